"""The interface of what models are asked, and what goes with every scoring.

A text, a task that was learned and a probe are subjects (`subjects.py` chooses). Each is made before torch is imported,
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

Progress = Callable[[int, float, float], None]
"""Called after every batch with the length, the work done and the whole work (both in FLOPs)."""


@dataclass(frozen=True)
class ScoringContext:
    """What goes with the scoring of a model, whatever it is asked."""

    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the records that say where the model comes from."""
    batch_tokens: int | None = None
    """Input tokens per forward pass; what is usual on the device if None."""
    progress: Progress = lambda length, done, total: None


class EvalTarget(Protocol):
    """What models are asked."""

    @property
    def max_tokens_per_batch(self) -> Sequence[int]:
        """How many tokens a model is given at once, at each length."""

    def count_flops(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """What a model answers, at each length that it has positions for.

        Raises:
            UserError: the model has positions for none of the lengths.
            RunError: a loss is not finite, or the memory is too small.
        """

    def baseline_records(self) -> list[Record]:
        """What stands beside the models' answers, and is none of theirs."""
