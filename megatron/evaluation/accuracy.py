"""Records of what is right: accuracy at each length with its interval, changes, and the mean over lengths.

accuracy        right answers over counted answers, of all sequences of a length together
exact_match     share of the sequences without a mistake, for tasks whose answer is one whole
mean_accuracy   mean of the accuracies at the lengths beyond training, each length as much as the other
intervals       95%, percentile bootstrap over sequences (`megatron.reports.bootstrap`)

Lengths have sequences of their own, so that of a change, or of a mean, is made of draws that are independent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.evaluation.changes import add_relative_changes
from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.records import Record
from megatron.tasks.task import TaskBatch


class AccuracySample(NamedTuple):
    """One length."""

    record: Record
    draws: np.ndarray | None = None
    """Of its value, by bootstrap [resamples]; None where its own scatter is not known."""


def compute_accuracies(
    correct: np.ndarray, drawn: TaskBatch, about: Mapping[str, Any], *, whole: bool = False
) -> list[AccuracySample]:
    """What is right at a length.

    Args:
        correct: which answers are, bool [sequences, T].
        drawn: the sequences.
        about: fields of the records.
        whole: is the share of sequences without a mistake told too?
    """
    counts, rights = drawn.accuracy_mask.sum(axis=1), correct.sum(axis=1)
    kinds = {"accuracy": (rights, counts)}
    if whole:
        kinds["exact_match"] = ((rights == counts).astype(np.int64), np.ones_like(counts))
    found = []
    for metric, (sums, of) in kinds.items():
        means = draw_bootstrap_means(sums[None].astype(np.float64), of)
        draws = None if means is None else means[0]
        value, tokens = float(sums.sum() / of.sum()), int(counts.sum())
        found.append(
            AccuracySample(Record(metric=metric, value=value, tokens=tokens, **_interval_ends(draws), **about), draws)
        )
    return found


def aggregate_accuracies(counted: Sequence[AccuracySample]) -> list[Record]:
    """Records of one predictor at all lengths, with their changes, and their mean over lengths."""
    draws = {(each.record.metric, each.record.length): each.draws for each in counted}
    changed = add_relative_changes([each.record for each in counted])
    return [*(_with_interval(record, draws) for record in changed), *_mean_record(counted)]


def _with_interval(record: Record, draws: Mapping[tuple[str, int], np.ndarray | None]) -> Record:
    """A record with the interval of its change, where both ends of it have draws (by metric and length)."""
    own = draws[record.metric, record.length]
    base = None if record.change_from is None else draws[record.metric, record.change_from]
    if own is None or base is None:
        return record
    return record.replace(**_interval_ends(own - _resample_unpaired(base, 1), "change_"))


def _resample_unpaired(draws: np.ndarray, turn: int) -> np.ndarray:
    """The same draws in another order. Those of all lengths come from one seed: at equal numbers of sequences the nth
    draw has the same indices everywhere, which has no meaning between sequences that have nothing in common."""
    return np.roll(draws, turn)


def _interval_ends(draws: np.ndarray | None, prefix: str = "") -> dict[str, Any]:
    if draws is None:
        return {}
    low, high = compute_percentile_interval(draws)
    return {f"{prefix}low": low, f"{prefix}high": high}


def _mean_record(counted: Sequence[AccuracySample]) -> list[Record]:
    """The mean over lengths beyond training; nothing if there is none."""
    of_accuracy = [each for each in counted if each.record.metric == "accuracy"]
    kept = [each for each in of_accuracy if each.record.length > each.record.train_length]
    if not kept:
        return []
    beyond = [each.record for each in kept]
    draws = [_resample_unpaired(each.draws, turn) for turn, each in enumerate(kept) if each.draws is not None]
    sure = len(draws) == len(kept)
    own = {
        "metric": "mean_accuracy",
        "value": sum(each.value for each in beyond) / len(beyond),
        "tokens": sum(each.tokens for each in beyond),
        "nll": None if beyond[-1].nll is None else sum(each.nll or 0.0 for each in beyond) / len(beyond),
        **(_interval_ends(np.mean(draws, axis=0)) if sure else {"low": None, "high": None}),
        "seconds": None,
        "remark": f"The mean over the lengths {', '.join(f'{each.length:,}' for each in beyond)}. {beyond[-1].remark}",
    }
    return [beyond[-1].replace(**own)]
