"""Asks models the task that they learned, at lengths of the input beyond training: accuracy and loss.

At each length n a fixed seed draws fresh sequences, the same for every run; none of them depends on a run's own seed.
An answer is the likeliest of the task's answers (`answers.py`), and `accuracy.py` makes records of what is right.
Their nll is the mean of −log p(label) over all places that are asked, in nats.

Beside the models stand predictors that learned nothing (`megatron.tasks.floors`), as records of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.evaluation.accuracy import Counted, accuracies, summed_up
from megatron.evaluation.lengths import wanted_lengths
from megatron.evaluation.provenance import about_model, stopwatch
from megatron.evaluation.subject import Scoring
from megatron.evaluation.work import forward_flops
from megatron.options.evaluation import EvaluationOptions, refuse_choices_of_text
from megatron.reports.records import TRIVIAL_BASELINE_PREFIX, Record
from megatron.tasks.chosen import Exercise, exercise
from megatron.tasks.floors import right
from megatron.tasks.task import Drawn
from megatron.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.checkpoint.trained_run import TrainedRun
    from megatron.config.schema import Config
    from megatron.model.gpt import GPT

# torch is imported where it is used: a mistake in what was asked for is told at once.

SEQUENCES = 512
"""Fresh sequences at each length, as in Delétang et al. (2023)."""

MULTIPLES = [1.0, 2.0, 4.0, 8.0]
"""Lengths in longest training inputs, unless said otherwise."""

FITTED = 2048
"""Sequences from which trivial predictors take their answers, at each length."""
FITTED_TOKENS = 1 << 26
"""Of these sequences at most: half a gigabyte; beyond 30,000 tokens there are fewer of them."""

SEED = 20_230_609

OF_TEXTS = ("data", "protocol", "targets", "stride", "measures")
"""Options that have no meaning for a task."""


@dataclass(frozen=True)
class Questions:
    """What all runs of a task are asked, a subject (`megatron.evaluation.subject`)."""

    exercise: Exercise
    lengths: tuple[int, ...]  # of inputs, ascending
    count: int  # sequences at each length

    def draw(self, length: int, *, fitting: bool = False) -> Drawn:
        """The sequences of a length; or, for trivial predictors to be fitted, others of that length."""
        name = hashlib.blake2b(self.exercise.identity.encode(), digest_size=8).digest()
        origin = [SEED, int.from_bytes(name, "big"), length, int(fitting)]
        generator = np.random.Generator(np.random.PCG64(origin))
        count = self.count
        if fitting:
            count = max(1, min(FITTED, FITTED_TOKENS // self.exercise.task.places(length)))
        return self.exercise.task.draw(generator, count, length)

    @cached_property
    def digest(self) -> str:
        """Equal digests, equal sequences at every length that both have."""
        return _hash(f"{SEED} {self.exercise.identity} {self.count}")

    @property
    def about(self) -> dict[str, Any]:
        """What every record says of what was asked."""
        task = self.exercise.task
        named = f"Task {self.exercise.identity} of {task.source}: {task.title}; lengths are those of the input."
        order = "The answer does not depend on the input's order († in DAPE V2's Table 6)." if task.order_free else ""
        return {
            "train_length": self.exercise.longest,
            "protocol": "task",
            "dataset": f"task {self.exercise.identity}",
            "text_digest": _hash(f"{SEED} {self.exercise.identity}"),  # however many sequences are drawn from it
            "target_digest": self.digest,
            "windows": self.count,
            "blocks": self.count,
            "remark": " ".join(filter(None, [named, order, task.note])),
        }

    @property
    def tokens_at_once(self) -> Sequence[int]:
        return [self.exercise.task.places(length) for length in self.lengths]

    def work(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        places = dict(zip(self.lengths, self.tokens_at_once, strict=True))
        known = {n: t for n, t in places.items() if model.max_length is None or t <= model.max_length}
        if not known:
            least = min(places.values())
            raise UserError(f"its positions end at {model.max_length:,}, a sequence of {least:,} tokens is past them")
        return {n: forward_flops(model, t, self.count) for n, t in known.items()}

    def score(self, loaded: LoadedModel, scoring: Scoring) -> list[Record]:
        """Accuracy at each length that the model has positions for. Raises as every subject's."""
        from megatron.evaluation.answers import answers

        model, task = loaded.model, self.exercise.task
        work = self.work(model)
        shared = {**about_model(loaded), **self.about, **scoring.about}
        if model.max_length is not None:
            shared["max_length"] = max(n for n in range(1, model.max_length) if task.places(n) <= model.max_length)
        found: list[Counted] = []
        done, total = 0.0, sum(work.values())
        for length, flops in work.items():
            drawn = self.draw(length)

            def after_batch(part: float, length: int = length, before: float = done, flops: float = flops) -> None:
                scoring.progress(length, before + flops * part, total)

            taken = stopwatch()
            losses, correct = answers(
                model, drawn, task.answers, batch_tokens=scoring.batch_tokens, after_batch=after_batch
            )
            done += flops
            nll = float(losses.sum() / drawn.asked.sum())
            if not math.isfinite(nll):
                raise RunError(f"{shared['method']}: the loss at length {length:,} is {nll}")
            own = {"length": length, "nll": nll, **taken()}
            found += accuracies(correct, drawn, {**shared, **own}, whole=task.whole)
        return summed_up(found)

    def beside(self) -> list[Record]:
        """What predictors that learned nothing reach on the same sequences: methods whose names begin with floor."""
        found: dict[str, list[Counted]] = {}
        for length in self.lengths:
            drawn = self.draw(length)
            about: dict[str, Any] = {**self.about, "length": length, "seed": 0}
            for name, correct in right(self.exercise.task, self.draw(length, fitting=True), drawn).items():
                found.setdefault(name, []).extend(
                    accuracies(correct, drawn, about | {"method": f"{TRIVIAL_BASELINE_PREFIX}{name}"})
                )
            for name, value in self.exercise.task.guesses(length).items():
                told = about | {
                    "method": f"{TRIVIAL_BASELINE_PREFIX}{name}",
                    "metric": "accuracy",
                    "tokens": int(drawn.counted.sum()),
                }
                found.setdefault(name, []).append(Counted(Record(**told, value=value)))
        return [record for counted in found.values() for record in summed_up(counted)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def learned_task(runs: Sequence[TrainedRun]) -> bool:
    """Did runs learn a task, and not a text? Raises UserError if they learned different things."""
    learned = [None if run.config.data.task is None else exercise(run.config.data).identity for run in runs]
    for run, other in zip(runs, learned, strict=True):
        if other != learned[0]:
            named = [f"the task {name}" if name else "a text" for name in (other, learned[0])]
            raise UserError(f"{run.name} learned {named[0]}, {runs[0].name} {named[1]}: ask them apart")
    return learned[0] is not None


def questions(options: EvaluationOptions, configs: Sequence[Config]) -> Questions:
    """What models of one task are asked.

    Raises:
        UserError: lengths that the task does not have, or options that are about texts.
    """
    refuse_choices_of_text(options, OF_TEXTS, "a task is none")
    chosen = [exercise(config.data) for config in configs]
    if options.lengths is None and options.multiples is None:
        options = options.replace(multiples=MULTIPLES)
    lengths = wanted_lengths(options, [each.longest for each in chosen])
    for length in lengths:
        if (why := chosen[0].task.refusal(length)) is not None:
            raise UserError(f"lengths: {length} is none of the task {chosen[0].identity}: {why}")
    return Questions(chosen[0], lengths, options.windows or SEQUENCES)
