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
from megatron.evaluation.measures import summary_of
from megatron.evaluation.provenance import about_model, stopwatch
from megatron.evaluation.subject import Scoring
from megatron.evaluation.work import forward_flops, known_lengths
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.records import Record
from megatron.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

# torch is imported where it is used: a mistake in what was asked for is told at once.

SEED = 20_220_924


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
    def of(cls, options: EvaluationOptions, lengths: Sequence[int], count: int, tokenizer: Tokenizer) -> Self:
        """The probe that options ask for. Raises UserError if they ask for something that it does not do."""

    @property
    def tokens_at_once(self) -> Sequence[int]:
        return self.lengths

    @property
    @abstractmethod
    def scored(self) -> int:
        """Targets at the end of each window."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """Tokens of the shortest window."""

    @abstractmethod
    def marks(self, length: int) -> tuple[float, ...]:
        """On the axis, for windows of that length; none for shorter ones than the shortest."""

    @abstractmethod
    def sequences(self, length: int, place: float) -> np.ndarray:
        """int64 [N, L + 1]: the input and, shifted by one, the targets; the last `scored + 1` are always the same."""

    @property
    @abstractmethod
    def remark(self) -> str:
        """What is told under every table."""

    def check(self) -> None:
        """Raises UserError if a length has no place."""
        for length in self.lengths:
            if length < self.shortest:
                raise UserError(
                    f"protocol {self.name}: windows of {length:,} tokens are too short for it; it needs "
                    f"{self.shortest:,} at least"
                )

    def work(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        return {
            length: forward_flops(model, length, self.count * len(self.marks(length)))
            for length in known_lengths(model, self.lengths)
        }

    def score(self, loaded: LoadedModel, scoring: Scoring) -> list[Record]:
        """The loss at each place of each length that the model has positions for. Raises as every subject's."""
        from megatron.evaluation.perplexity import window_losses

        work = self.work(loaded.model)
        shared = {**about_model(loaded), **scoring.about, **self._about()}
        found: list[Record] = []
        done, total = 0.0, sum(work.values())
        for length, flops in work.items():
            marks = self.marks(length)
            for place in marks:
                sequences = self.sequences(length, place)
                starts = np.arange(self.count, dtype=np.int64) * (length + 1)
                taken = stopwatch()
                losses = window_losses(
                    loaded.model, sequences.reshape(-1), starts, length, self.scored, batch_tokens=scoring.batch_tokens
                )
                if not np.isfinite(losses).all():
                    raise RunError(f"{shared['method']}: the loss at {self.axis} {place:g} of {length:,} is not finite")
                done += flops / len(marks)
                scoring.progress(length, done, total)
                own: dict[str, Any] = {"length": length, "place": float(place), "flops": flops / len(marks), **taken()}
                found.append(Record(**shared, **own, **_measured(losses)))
        return found

    def beside(self) -> list[Record]:
        return []

    def _about(self) -> dict[str, Any]:
        longest = self.lengths[-1]
        targets = self.sequences(longest, self.marks(longest)[0])[:, -self.scored :]
        source = f"{self.name} {self.vocabulary.name}".encode()
        digest = hashlib.sha256(source + targets.astype("<i8").tobytes())
        return {
            "protocol": self.name,
            "axis": self.axis,
            "metric": "loss",
            "targets": self.scored,
            "windows": self.count,
            "blocks": self.count,
            "dataset": f"probe {self.name}",
            "text_digest": hashlib.sha256(source).hexdigest()[:16],  # however many sequences are drawn from it
            "target_digest": digest.hexdigest()[:16],
            "tokenizer": self.vocabulary.name,
            "remark": self.remark,
        }


def _measured(losses: np.ndarray) -> dict[str, Any]:
    """Value and interval of losses [N, targets]; sequences are the independent samples."""
    sums, counts = losses.sum(axis=1), np.full(len(losses), losses.shape[1])
    summary, draws = summary_of(sums, counts), draw_bootstrap_means(sums[None], counts)
    found: dict[str, Any] = {"value": summary.nll, "nll": summary.nll, "tokens": summary.tokens}
    if draws is not None:
        low, high = compute_percentile_interval(draws[0])
        found |= {"stderr": summary.stderr, "low": low, "high": high}
    return found
