"""The interface of what models are asked, and what goes with every scoring.

A text, a task that was learned and a probe are targets (`targets.py` chooses). Each is made before torch is imported,
and refuses then what cannot be asked.
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
"""Called after every batch with the length, the work done and the whole work (both in FLOPs)."""


KeepRecords = Callable[[Sequence[Record]], None]
"""Called with the records of the model that are whole, from the first on, to be found again after an interruption."""


@dataclass(frozen=True)
class ScoringContext:
    """What goes with the scoring of a model, whatever it is asked."""

    record_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the records that say where the model comes from."""
    batch_tokens: int | None = None
    """Input tokens per forward pass; what is usual on the device if None."""
    progress: ProgressCallback = lambda length, done, total: None
    finished_records: Sequence[Record] = ()
    """Those that an interrupted evaluation left, of any model: what is among them need not be measured again."""
    keep_records: KeepRecords = lambda records: None


class EvalTarget(Protocol):
    """What models are asked."""

    @property
    def sequence_lengths(self) -> Sequence[int]:
        """Tokens of the sequences that a model reads, at each length."""

    def count_flops(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Records of a model's answers, at each length that it has positions for.

        Raises:
            UserError: the model has positions for none of the lengths.
            RunError: a loss is not finite, or the memory is too small.
        """

    def build_baseline_records(self) -> list[Record]:
        """Records that stand beside the models' answers, and are of no model."""
