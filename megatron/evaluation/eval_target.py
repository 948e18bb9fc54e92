"""Interface of evaluation targets, the context of every scoring call, and the lengths at which models are scored.

A target is a text, a task that the models were trained on, a probe (`run.py` selects one), or the tasks of
lm-evaluation-harness (`harness_tasks.py`). Targets are built before torch is imported, so that unsupported requests
fail early.

Lengths are given in tokens or as multiples of the training length. The default is 1 to 32 training lengths. The cost of
scoring is computed from the shape of a model, without its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.options.evaluation import MAX_EVALUATION_LENGTH, EvaluationOptions
from megatron.reports.records import Record
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

ProgressCallback = Callable[[int, float, float], None]
"""Callback after every batch, called with the length, the work done, and the total work (both in FLOPs)."""


SaveRecords = Callable[[Sequence[Record]], None]
"""Callback that saves the finished records of a model, so that an interrupted evaluation can resume from them."""


@dataclass(frozen=True)
class ScoringContext:
    """Settings and callbacks for scoring one model, independent of the target."""

    record_fields: Mapping[str, Any] = field(default_factory=dict)
    """Record fields that identify the model."""
    batch_tokens: int | None = None
    """Input tokens per forward pass; the default of the device if None."""
    progress: ProgressCallback = lambda length, done, total: None
    finished_records: Sequence[Record] = ()
    """Records of any model, left by an interrupted evaluation. A target may reuse them instead of scoring again."""
    save_records: SaveRecords = lambda records: None


class EvalTarget(Protocol):
    """Text, tasks, or probe that models are evaluated on."""

    @property
    def sequence_lengths(self) -> Sequence[int]:
        """Sequence lengths that a model reads, in tokens."""

    def count_flops(self, model: GPT) -> dict[int, float]:
        """Return the FLOPs of scoring a model, for each length that it supports.

        Raises:
            UserError: the model supports none of the lengths.
        """

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Score a model at each length that it supports, and return the records.

        Raises:
            UserError: the model supports none of the lengths.
            RunError: a loss is not finite, or device memory is too small.
        """

    def build_baseline_records(self) -> list[Record]:
        """Return the records of trivial baselines, which belong to no model."""


DEFAULT_MULTIPLES = (1, 2, 4, 8, 16, 32)


def choose_lengths(options: EvaluationOptions, train_lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the window lengths in tokens, ascending.

    Args:
        options: lengths in tokens, as multiples of the training length, or neither.
        train_lengths: training lengths of the runs; multiples require them to be equal.

    Raises:
        UserError: a multiple is not a whole number of tokens, or the runs have different training lengths.
    """
    multiples: Sequence[float] = options.multiples or ()
    same_train_length = len(set(train_lengths)) == 1
    if options.lengths is None and options.multiples is None:
        if not same_train_length:
            trained = ", ".join(f"{length:,}" for length in sorted(set(train_lengths)))
            raise UserError(
                f"lengths: they must be in tokens, because the runs were trained at different lengths ({trained})"
            )
        multiples = DEFAULT_MULTIPLES
    lengths = set(options.lengths or ())
    for multiple in multiples:
        if not same_train_length:
            raise UserError(
                f"lengths: {multiple:g}x is ambiguous, because the runs were trained at different lengths; give "
                "lengths in tokens"
            )
        length = multiple * train_lengths[0]
        # 1.1 · 100 is 110.00000000000001 in float64.
        if not (1 <= length < MAX_EVALUATION_LENGTH and math.isclose(length, round(length), rel_tol=1e-12)):
            raise UserError(
                f"lengths: {multiple:g}x is {length:.6g} tokens at the training length {train_lengths[0]:,}; "
                "it must be a whole number of tokens"
            )
        lengths.add(round(length))
    return tuple(sorted(lengths))


def limit_lengths(lengths: Iterable[int], max_length: int | None, reason: str | None = None) -> list[int]:
    """Return the lengths that a model supports, ascending.

    Args:
        lengths: at least one length, in tokens.
        max_length: maximum length of the model, or None if unlimited.
        reason: cause of the limit, for the error message.

    Raises:
        UserError: all lengths exceed the limit.
    """
    lengths = sorted(lengths)
    if max_length is None:
        return lengths
    if lengths[0] > max_length:
        reason = reason or f"the maximum length is {max_length:,}"
        raise UserError(f"{reason}, less than length {lengths[0]:,}; use lengths up to {max_length:,} or omit this one")
    return [length for length in lengths if length <= max_length]


def count_forward_flops(model: GPT, length: int, num_sequences: int) -> float:
    """Return the FLOPs of scoring `num_sequences` sequences: a third of those of a forward and a backward pass."""
    return model.count_flops_per_token(length) / 3 * length * num_sequences


def count_flops_by_length(model: GPT, num_sequences: Mapping[int, int]) -> dict[int, float]:
    """Return the FLOPs of scoring a model, for each length that it supports.

    Args:
        num_sequences: number of sequences by length in tokens.

    Raises:
        UserError: the model supports none of the lengths.
    """
    return {
        length: count_forward_flops(model, length, num_sequences[length])
        for length in limit_lengths(num_sequences, model.max_length)
    }
