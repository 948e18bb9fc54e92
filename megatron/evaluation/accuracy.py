"""Records of what is right: accuracy at each length with its interval, changes, and the mean over lengths.

accuracy        right answers over counted answers, of all sequences of a length together
exact_match     share of the sequences without a mistake, for tasks whose answer is one whole
mean_accuracy   mean of the accuracies at the lengths beyond training, each length as much as the other
intervals       95%, percentile bootstrap over sequences (`megatron.reports.bootstrap`)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron.evaluation.changes import with_changes
from megatron.reports.bootstrap import quantiles, resampled
from megatron.reports.records import Record
from megatron.tasks.task import Drawn


def accuracies(correct: np.ndarray, drawn: Drawn, about: Mapping[str, Any], *, whole: bool = False) -> list[Record]:
    """What is right at a length.

    Args:
        correct: which answers are, bool [sequences, T].
        drawn: the sequences.
        about: fields of the records.
        whole: is the share of sequences without a mistake told too?
    """
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


def summed_up(records: Sequence[Record]) -> list[Record]:
    """Records of one predictor at all lengths, with their changes, and their mean over lengths."""
    return [*with_changes(records), *_mean(records)]


def _mean(records: Sequence[Record]) -> list[Record]:
    """The mean over lengths beyond training; nothing if there is none."""
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
