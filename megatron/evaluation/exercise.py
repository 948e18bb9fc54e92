"""Scores a model that learned a task: accuracy and loss at lengths of the input beyond training.

At each length n a fixed seed draws fresh sequences, the same for every run; none of them depends on a run's own seed.
An answer is the likeliest of the task's answers, and the loss is taken over these alone: what share of the softmax a
model leaves to ids that are never right is not what is asked.

    accuracy   right answers over counted answers, of all sequences of a length together
    nll        mean of −log p(label) over all places that are asked, in nats
    intervals  95%, percentile bootstrap over sequences (`megatron.reports.bootstrap`)

Beside the models stand predictors that learned nothing (`megatron.tasks.floors`), as records of their own.

B sequences of a batch, T tokens of a sequence, A answers.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.errors import RunError, UserError
from megatron.evaluation.lengths import wanted_lengths
from megatron.evaluation.options import EvaluationOptions
from megatron.reports.bootstrap import quantiles, resampled
from megatron.reports.records import Record
from megatron.tasks.chosen import Exercise, exercise
from megatron.tasks.floors import right
from megatron.tasks.task import Drawn

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.checkpoint.trained import Run
    from megatron.config.schema import Config
    from megatron.evaluation.perplexity import Progress
    from megatron.model.gpt import GPT

# torch is imported where it is used: a mistake in what was asked for is told at once.

SEQUENCES = 512
"""Fresh sequences at each length, as in Delétang et al. (2023)."""

MULTIPLES = [1.0, 2.0, 4.0, 8.0]
"""Lengths in longest training inputs, unless said otherwise."""

FITTED = 2048
"""Sequences from which trivial predictors take their answers, at each length."""

SEED = 20_230_609

OF_TEXTS = ("data", "protocol", "targets", "stride", "measures")
"""Options that say which tokens of which text are scored."""


@dataclass(frozen=True)
class Questions:
    """What all runs of an evaluation are asked."""

    exercise: Exercise
    lengths: tuple[int, ...]  # of inputs, ascending
    count: int  # sequences at each length

    def draw(self, length: int, *, fitting: bool = False) -> Drawn:
        """The sequences of a length; or, for trivial predictors to be fitted, others of that length."""
        name = hashlib.blake2b(self.exercise.identity.encode(), digest_size=8).digest()
        origin = [SEED, int.from_bytes(name, "big"), length, int(fitting)]
        generator = np.random.Generator(np.random.PCG64(origin))
        return self.exercise.task.draw(generator, FITTED if fitting else self.count, length)

    @cached_property
    def digest(self) -> str:
        """Equal digests, equal sequences at every length that both have."""
        return hashlib.sha256(f"{SEED} {self.exercise.identity} {self.count}".encode()).hexdigest()[:16]

    @property
    def about(self) -> dict[str, Any]:
        """What every record says of what was asked."""
        task = self.exercise.task
        named = f"Task {self.exercise.identity}: {task.title}; lengths are those of the input."
        order = "† Its answer does not depend on the order of the input." if task.order_free else ""
        return {
            "train_length": self.exercise.longest,
            "protocol": "task",
            "dataset": f"task {self.exercise.identity}",
            "text_digest": self.digest,
            "target_digest": self.digest,
            "windows": self.count,
            "blocks": self.count,
            "remark": " ".join(filter(None, [named, order, task.note])),
        }

    def work(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        places = {length: self.exercise.task.places(length) for length in self.lengths}
        known = {n: t for n, t in places.items() if model.max_length is None or t <= model.max_length}
        if not known:
            least = min(places.values())
            raise UserError(f"its positions end at {model.max_length:,}, a sequence of {least:,} tokens is past them")
        return {n: model.flops_per_token(t) / 3 * t * self.count for n, t in known.items()}


def learned_task(runs: Sequence[Run]) -> bool:
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
    for name in OF_TEXTS:
        if getattr(options, name) != EvaluationOptions.model_fields[name].get_default():
            raise UserError(f"--{name} says which text is scored, and a task is none: leave it out")
    chosen = [exercise(config.data) for config in configs]
    if options.lengths is None and options.multiples is None:
        options = options.replace(multiples=MULTIPLES)
    lengths = wanted_lengths(options, [each.longest for each in chosen])
    for length in lengths:
        if (why := chosen[0].task.refusal(length)) is not None:
            raise UserError(f"lengths: {length} is none of the task {chosen[0].identity}: {why}")
    return Questions(chosen[0], lengths, options.windows or SEQUENCES)


def score(
    loaded: LoadedModel,
    asked: Questions,
    *,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[Record]:
    """Accuracy of a model at each length that it has positions for.

    Args:
        loaded: a model that learned the task.
        asked: what it is asked.
        batch_tokens: input tokens per forward pass.
        progress: called after every batch.
        about: fields of the records that say where the model comes from.

    Raises:
        UserError: the model has positions for none of the lengths.
        RunError: a loss is not finite, or the memory is too small.
    """
    from megatron.evaluation.perplexity import about_model

    model, task = loaded.model, asked.exercise.task
    work = asked.work(model)
    shared = {**about_model(loaded), **asked.about, **(about or {})}
    if model.max_length is not None:
        shared["max_length"] = max(n for n in range(1, model.max_length) if task.places(n) <= model.max_length)
    found: list[Record] = []
    done, total = 0.0, sum(work.values())
    for length, flops in work.items():
        drawn = asked.draw(length)

        def after_batch(part: float, length: int = length, before: float = done, flops: float = flops) -> None:
            if progress is not None:
                progress(length, before + flops * part, total)

        begun = time.perf_counter()
        losses, correct = answers(model, drawn, task.answers, batch_tokens=batch_tokens, after_batch=after_batch)
        done += flops
        nll = float(losses.sum() / drawn.asked.sum())
        if not math.isfinite(nll):
            raise RunError(f"{shared['method']}: the loss at length {length:,} is {nll}")
        own = {
            "length": length,
            "nll": nll,
            "seconds": round(time.perf_counter() - begun, 3),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        found += _records(correct, drawn, {**shared, **own}, whole=task.whole)
    return _summed_up(found)


def floors(asked: Questions) -> list[Record]:
    """What predictors that learned nothing reach on the same sequences, as records of methods that begin with floor."""
    found: dict[str, list[Record]] = {}
    for length in asked.lengths:
        drawn = asked.draw(length)
        for name, correct in right(asked.exercise.task, asked.draw(length, fitting=True), drawn).items():
            about = {**asked.about, "length": length, "seed": 0, "method": f"floor: {name}"}
            found.setdefault(name, []).extend(_records(correct, drawn, about))
        for name, value in asked.exercise.task.guesses(length).items():
            about = {**asked.about, "length": length, "seed": 0, "method": f"floor: {name}", "metric": "accuracy"}
            found.setdefault(name, []).append(Record(**about, value=value, tokens=int(drawn.counted.sum())))
    return [record for records in found.values() for record in _summed_up(records)]


def _summed_up(records: Sequence[Record]) -> list[Record]:
    return [*_with_changes(records), *_mean(records)]


def answers(
    model: Any,
    drawn: Drawn,
    choices: range,
    *,
    batch_tokens: int | None = None,
    after_batch: Any = lambda part: None,
) -> tuple[np.ndarray, np.ndarray]:
    """What a model answers to sequences.

    Args:
        model: called as `model(tokens [B, T], last=n)`, returns logits [B, n, V].
        drawn: the sequences.
        choices: ids that may be answered.
        batch_tokens: input tokens per forward pass; at least one sequence is always taken.
        after_batch: called with the share of the sequences that is done.

    Returns:
        Losses of each place in nats, float64 [sequences, T], 0 where nothing is asked; and whether the likeliest answer
        is right, bool [sequences, T], False where nothing counts.

    Raises:
        RunError: the device's memory is too small for a single sequence.
    """
    import torch

    from megatron.evaluation.batching import in_batches

    device = next(model.parameters()).device
    sequences, places = drawn.tokens.shape
    last = places - int(drawn.asked.any(axis=0).argmax())  # nothing is asked before
    losses, correct = np.zeros(drawn.labels.shape), np.zeros(drawn.labels.shape, dtype=bool)
    done = 0

    @torch.inference_mode()
    def take(rows: slice) -> None:
        tokens, labels = (torch.from_numpy(array[rows]).to(device) for array in (drawn.tokens, drawn.labels))
        logits = model(tokens, last=last)[:, :, choices.start : choices.stop].float()
        wanted = labels[:, -last:] - choices.start
        chances = logits.log_softmax(dim=2).gather(2, wanted[:, :, None])[:, :, 0]
        losses[rows, -last:] = -chances.double().cpu().numpy()
        correct[rows, -last:] = (logits.argmax(dim=2) == wanted).cpu().numpy()

    def after(count: int) -> None:
        nonlocal done
        done += count
        after_batch(done / sequences)

    too_large = f"one sequence of {places:,} tokens does not fit the memory of {device}; use shorter lengths"
    in_batches(sequences, places, device, take, too_large=too_large, batch_tokens=batch_tokens, after=after)
    return np.where(drawn.asked, losses, 0.0), correct & drawn.counted


def _records(correct: np.ndarray, drawn: Drawn, about: dict[str, Any], *, whole: bool = False) -> list[Record]:
    """Accuracy of a length, and the share of sequences without a mistake."""
    counts, rights = drawn.counted.sum(axis=1), correct.sum(axis=1)
    kinds = {"accuracy": (rights, counts)}
    if whole:
        kinds["exact_match"] = ((rights == counts).astype(np.int64), np.ones_like(counts))
    found = []
    for metric, (sums, of) in kinds.items():
        draws = resampled(sums[None].astype(np.float64), of)
        ends: dict[str, Any] = {} if draws is None else dict(zip(("low", "high"), quantiles(draws[0]), strict=True))
        value, tokens = float(sums.sum() / of.sum()), int(counts.sum())
        found.append(Record(metric=metric, value=value, tokens=tokens, **ends, **about))
    return found


def _with_changes(records: Sequence[Record]) -> list[Record]:
    """Records of one predictor with their changes from the shortest length. Lengths have sequences of their own, so
    nothing is paired, and no interval is said."""
    first = {record.metric: record for record in reversed(records)}
    return [
        record
        if record is first[record.metric]
        else record.replace(
            change=record.measure.change(record.value, first[record.metric].value),
            change_from=first[record.metric].length,
        )
        for record in records
    ]


def _mean(records: Sequence[Record]) -> list[Record]:
    """The mean over lengths beyond training, each length as much as the other; nothing if there is none."""
    beyond = [each for each in records if each.metric == "accuracy" and each.length > each.train_length]
    if not beyond:
        return []
    own = {
        "metric": "mean_accuracy",
        "value": sum(each.value for each in beyond) / len(beyond),
        "tokens": sum(each.tokens for each in beyond),
        "nll": None if beyond[-1].nll is None else sum(each.nll or 0.0 for each in beyond) / len(beyond),
        "low": None,
        "high": None,
        "seconds": None,
        "remark": f"The mean over the lengths {', '.join(f'{each.length:,}' for each in beyond)}. {beyond[-1].remark}",
    }
    return [beyond[-1].replace(**own)]
