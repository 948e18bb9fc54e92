"""Asks models the task that they learned, at lengths of the input beyond training: accuracy and loss.

At each length n a fixed seed draws fresh sequences, the same for every run; none of them depends on a run's own seed.
An answer is the likeliest of the task's answers (`answers.py`), and `accuracy.py` makes records of what is right.
Their nll is the mean of −log p(label) over all places that are asked, in nats.

Beside the models stand predictors that learned nothing (`megatron.tasks.trivial_baselines`), as records of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.evaluation.accuracy import AccuracySample, aggregate_accuracies, compute_accuracies
from megatron.evaluation.lengths import choose_lengths
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.evaluation.subject import ScoringContext
from megatron.evaluation.work import count_forward_flops
from megatron.options.evaluation import EvaluationOptions, refuse_choices_of_text
from megatron.reports.records import TRIVIAL_BASELINE_PREFIX, Record
from megatron.tasks.task import TaskBatch
from megatron.tasks.task_config import TaskConfig, read_task_config
from megatron.tasks.trivial_baselines import measure_baseline_correctness
from megatron.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.checkpoint.trained_run import TrainedRun
    from megatron.config.schema import Config
    from megatron.model.gpt import GPT

# torch is imported where it is used: a mistake in what was asked for is told at once.

DEFAULT_NUM_SEQUENCES = 512
"""Fresh sequences at each length, as in Delétang et al. (2023)."""

MULTIPLES = [1.0, 2.0, 4.0, 8.0]
"""Lengths in longest training inputs, unless said otherwise."""

NUM_FITTING_SEQUENCES = 2048
"""Sequences from which trivial predictors take their answers, at each length."""
MAX_FITTING_TOKENS = 1 << 26
"""Of these sequences at most: half a gigabyte; beyond 30,000 tokens there are fewer of them."""

TASK_SEED = 20_230_609

OF_TEXTS = ("data", "protocol", "targets", "stride", "measures")
"""Options that have no meaning for a task."""


@dataclass(frozen=True)
class TaskEval:
    """What all runs of a task are asked, a subject (`megatron.evaluation.subject`)."""

    task_config: TaskConfig
    lengths: tuple[int, ...]  # of inputs, ascending
    count: int  # sequences at each length

    def sample_batch(self, length: int, *, fitting: bool = False) -> TaskBatch:
        """The sequences of a length; or, for trivial predictors to be fitted, others of that length."""
        name = hashlib.blake2b(self.task_config.label.encode(), digest_size=8).digest()
        origin = [TASK_SEED, int.from_bytes(name, "big"), length, int(fitting)]
        generator = np.random.Generator(np.random.PCG64(origin))
        count = self.count
        if fitting:
            count = max(
                1, min(NUM_FITTING_SEQUENCES, MAX_FITTING_TOKENS // self.task_config.task.sequence_length(length))
            )
        return self.task_config.task.sample_batch(generator, count, length)

    @cached_property
    def digest(self) -> str:
        """Equal digests, equal sequences at every length that both have."""
        return _hash(f"{TASK_SEED} {self.task_config.label} {self.count}")

    @property
    def describe(self) -> dict[str, Any]:
        """What every record says of what was asked."""
        task = self.task_config.task
        named = f"Task {self.task_config.label} of {task.paper}: {task.title}; lengths are those of the input."
        order = (
            "The answer does not depend on the input's order († in DAPE V2's Table 6)."
            if task.permutation_invariant
            else ""
        )
        return {
            "train_length": self.task_config.max_length,
            "protocol": "task",
            "dataset": f"task {self.task_config.label}",
            "text_digest": _hash(f"{TASK_SEED} {self.task_config.label}"),  # however many sequences are drawn from it
            "target_digest": self.digest,
            "windows": self.count,
            "blocks": self.count,
            "remark": " ".join(filter(None, [named, order, task.note])),
        }

    @property
    def max_tokens_per_batch(self) -> Sequence[int]:
        return [self.task_config.task.sequence_length(length) for length in self.lengths]

    def count_flops(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        places = dict(zip(self.lengths, self.max_tokens_per_batch, strict=True))
        known = {n: t for n, t in places.items() if model.max_length is None or t <= model.max_length}
        if not known:
            least = min(places.values())
            raise UserError(f"its positions end at {model.max_length:,}, a sequence of {least:,} tokens is past them")
        return {n: count_forward_flops(model, t, self.count) for n, t in known.items()}

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Accuracy at each length that the model has positions for. Raises as every subject's."""
        from megatron.evaluation.answers import score_answers

        model, task = loaded.model, self.task_config.task
        work = self.count_flops(model)
        shared = {**describe_model(loaded), **self.describe, **scoring.about}
        if model.max_length is not None:
            shared["max_length"] = max(
                n for n in range(1, model.max_length) if task.sequence_length(n) <= model.max_length
            )
        found: list[AccuracySample] = []
        done, total = 0.0, sum(work.values())
        for length, flops in work.items():
            drawn = self.sample_batch(length)

            def after_batch(part: float, length: int = length, before: float = done, flops: float = flops) -> None:
                scoring.progress(length, before + flops * part, total)

            taken = start_stopwatch()
            losses, correct = score_answers(
                model, drawn, task.answer_ids, batch_tokens=scoring.batch_tokens, after_batch=after_batch
            )
            done += flops
            nll = float(losses.sum() / drawn.loss_mask.sum())
            if not math.isfinite(nll):
                raise RunError(f"{shared['method']}: the loss at length {length:,} is {nll}")
            own = {"length": length, "nll": nll, **taken()}
            found += compute_accuracies(correct, drawn, {**shared, **own}, whole=task.scores_exact_match)
        return aggregate_accuracies(found)

    def baseline_records(self) -> list[Record]:
        """What predictors that learned nothing reach on the same sequences: methods whose names begin with floor."""
        found: dict[str, list[AccuracySample]] = {}
        for length in self.lengths:
            drawn = self.sample_batch(length)
            about: dict[str, Any] = {**self.describe, "length": length, "seed": 0}
            for name, correct in measure_baseline_correctness(
                self.task_config.task, self.sample_batch(length, fitting=True), drawn
            ).items():
                found.setdefault(name, []).extend(
                    compute_accuracies(correct, drawn, about | {"method": f"{TRIVIAL_BASELINE_PREFIX}{name}"})
                )
            for name, value in self.task_config.task.baseline_accuracies(length).items():
                told = about | {
                    "method": f"{TRIVIAL_BASELINE_PREFIX}{name}",
                    "metric": "accuracy",
                    "tokens": int(drawn.accuracy_mask.sum()),
                }
                found.setdefault(name, []).append(AccuracySample(Record(**told, value=value)))
        return [record for counted in found.values() for record in aggregate_accuracies(counted)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_task_run(runs: Sequence[TrainedRun]) -> bool:
    """Did runs learn a task, and not a text? Raises UserError if they learned different things."""
    learned = [None if run.config.data.task is None else read_task_config(run.config.data).label for run in runs]
    for run, other in zip(runs, learned, strict=True):
        if other != learned[0]:
            named = [f"the task {name}" if name else "a text" for name in (other, learned[0])]
            raise UserError(f"{run.name} learned {named[0]}, {runs[0].name} {named[1]}: ask them apart")
    return learned[0] is not None


def build_task_eval(options: EvaluationOptions, configs: Sequence[Config]) -> TaskEval:
    """What models of one task are asked.

    Raises:
        UserError: lengths that the task does not have, or options that are about texts.
    """
    refuse_choices_of_text(options, OF_TEXTS, "a task is none")
    chosen = [read_task_config(config.data) for config in configs]
    if options.lengths is None and options.multiples is None:
        options = options.replace(multiples=MULTIPLES)
    lengths = choose_lengths(options, [each.max_length for each in chosen])
    for length in lengths:
        if (why := chosen[0].task.unsupported_length_reason(length)) is not None:
            raise UserError(f"lengths: {length} is none of the task {chosen[0].label}: {why}")
    return TaskEval(chosen[0], lengths, options.windows or DEFAULT_NUM_SEQUENCES)
