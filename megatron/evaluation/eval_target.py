"""Interface of evaluation targets, and the context passed to every scoring call.

A target is a text, a task that the models were trained on, or a probe (`targets.py` selects one). Targets are built
before torch is imported, so that unsupported requests fail early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.reports.records import Record

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

ProgressCallback = Callable[[int, float, float], None]
"""Callback after every batch, called with the length, the work done, and the total work (both in FLOPs)."""


KeepRecords = Callable[[Sequence[Record]], None]
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
    keep_records: KeepRecords = lambda records: None


class EvalTarget(Protocol):
    """Text, task, or probe that models are evaluated on."""

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
