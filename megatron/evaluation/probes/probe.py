"""The interface of a probe: what is asked at each place of each length, and how a model is scored on it.

A probe asks about the same target tokens at every place and every length: what stands before them differs alone. Its
sequences are drawn from a fixed seed, the same for every run with the tokenizer. Losses are in nats per target.

N sequences, L window length.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from megatron.data.tokenizers import Tokenizer
from megatron.data.vocabulary import Vocabulary
from megatron.evaluation.measures import summarize_losses
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.evaluation.subject import ScoringContext
from megatron.evaluation.work import count_forward_flops, limit_lengths
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.records import Record
from megatron.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

# torch is imported where it is used: a mistake in what was asked for is told at once.

PROBE_SEED = 20_220_924


class Probe(ABC):
    """A subject (`megatron.evaluation.subject`): windows that are made up, for each place of each length.

    Args:
        lengths: of windows, in tokens, ascending.
        count: N.
        vocabulary: of the models.
    """

    name: ClassVar[str]
    """Of its protocol."""
    axis: ClassVar[str]
    """That its places stand on (`megatron.reports.x_axes`)."""

    def __init__(self, lengths: Sequence[int], count: int, vocabulary: Vocabulary) -> None:
        self.lengths, self.count, self.vocabulary = tuple(lengths), count, vocabulary

    @classmethod
    @abstractmethod
    def from_options(cls, options: EvaluationOptions, lengths: Sequence[int], count: int, tokenizer: Tokenizer) -> Self:
        """The probe that options ask for. Raises UserError if they ask for something that it does not do."""

    @property
    def max_tokens_per_batch(self) -> Sequence[int]:
        return self.lengths

    @property
    @abstractmethod
    def num_scored_tokens(self) -> int:
        """Targets at the end of each window."""

    @property
    @abstractmethod
    def min_length(self) -> int:
        """Tokens of the shortest window."""

    @abstractmethod
    def list_axis_values(self, length: int) -> tuple[float, ...]:
        """On the axis, for windows of that length; none for shorter ones than the shortest."""

    @abstractmethod
    def build_sequences(self, length: int, axis_value: float) -> np.ndarray:
        """int64 [N, L + 1]: the input and, shifted by one, the targets; the last `scored + 1` are always the same."""

    @property
    @abstractmethod
    def describe_remark(self) -> str:
        """What is told under every table."""

    def check(self) -> None:
        """Raises UserError if a length has no place."""
        for length in self.lengths:
            if length < self.min_length:
                raise UserError(
                    f"protocol {self.name}: windows of {length:,} tokens are too short for it; it needs "
                    f"{self.min_length:,} at least"
                )

    def count_flops(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        return {
            length: count_forward_flops(model, length, self.count * len(self.list_axis_values(length)))
            for length in limit_lengths(model, self.lengths)
        }

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """The loss at each place of each length that the model has positions for. Raises as every subject's."""
        from megatron.evaluation.perplexity import compute_window_losses

        work = self.count_flops(loaded.model)
        shared = {**describe_model(loaded), **scoring.about, **self._describe()}
        found: list[Record] = []
        done, total = 0.0, sum(work.values())
        for length, flops in work.items():
            marks = self.list_axis_values(length)
            for place in marks:
                sequences = self.build_sequences(length, place)
                starts = np.arange(self.count, dtype=np.int64) * (length + 1)
                taken = start_stopwatch()
                losses = compute_window_losses(
                    loaded.model,
                    sequences.reshape(-1),
                    starts,
                    length,
                    self.num_scored_tokens,
                    batch_tokens=scoring.batch_tokens,
                )
                if not np.isfinite(losses).all():
                    raise RunError(f"{shared['method']}: the loss at {self.axis} {place:g} of {length:,} is not finite")
                done += flops / len(marks)
                scoring.progress(length, done, total)
                own: dict[str, Any] = {"length": length, "place": float(place), "flops": flops / len(marks), **taken()}
                found.append(Record(**shared, **own, **_summarize_losses(losses)))
        return found

    def baseline_records(self) -> list[Record]:
        return []

    def _describe(self) -> dict[str, Any]:
        longest = self.lengths[-1]
        targets = self.build_sequences(longest, self.list_axis_values(longest)[0])[:, -self.num_scored_tokens :]
        source = f"{self.name} {self.vocabulary.name}".encode()
        digest = hashlib.sha256(source + targets.astype("<i8").tobytes())
        return {
            "protocol": self.name,
            "axis": self.axis,
            "metric": "loss",
            "targets": self.num_scored_tokens,
            "windows": self.count,
            "blocks": self.count,
            "dataset": f"probe {self.name}",
            "text_digest": hashlib.sha256(source).hexdigest()[:16],  # however many sequences are drawn from it
            "target_digest": digest.hexdigest()[:16],
            "tokenizer": self.vocabulary.name,
            "remark": self.describe_remark,
        }


def _summarize_losses(losses: np.ndarray) -> dict[str, Any]:
    """Value and interval of losses [N, targets]; sequences are the independent samples."""
    sums, counts = losses.sum(axis=1), np.full(len(losses), losses.shape[1])
    summary, draws = summarize_losses(sums, counts), draw_bootstrap_means(sums[None], counts)
    found: dict[str, Any] = {"value": summary.nll, "nll": summary.nll, "tokens": summary.tokens}
    if draws is not None:
        low, high = compute_percentile_interval(draws[0])
        found |= {"stderr": summary.stderr, "low": low, "high": high}
    return found
