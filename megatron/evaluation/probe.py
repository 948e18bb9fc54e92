"""Interface of a probe: the sequences for each value on its axis, and how a model is scored; and repeated tokens.

A probe uses the same target tokens for every axis value and every length; only the preceding tokens differ. Its
sequences are drawn from a fixed seed, and are the same for every run with the same tokenizer. Losses are in nats per
target.

The probe with repeated random tokens measures from how far back a model can copy. Olsson et al. (2022, 2209.11895)
measure induction heads on them.

N sequences, L window length.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from megatron.data.load_tokenizer import Vocabulary, build_vocabulary
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.eval_target import ScoringContext, count_flops_by_length
from megatron.evaluation.loss_records import summarize_losses
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.records import Record
from megatron.reports.uncertainty import compute_percentile_interval, draw_bootstrap_means
from megatron.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

# torch is imported inside functions, so that errors in the options are reported at once.

PROBE_SEED = 20_220_924


class Probe(ABC):
    """Evaluation target with synthetic windows for each axis value and length.

    Args:
        lengths: window lengths in tokens, ascending.
        num_sequences: N.
        vocabulary: vocabulary of the models.
    """

    name: ClassVar[str]
    """Name of the protocol."""
    axis: ClassVar[str]
    """Name of the axis of its values (`megatron.reports.axes`)."""

    def __init__(self, lengths: Sequence[int], num_sequences: int, vocabulary: Vocabulary) -> None:
        self.lengths, self.num_sequences, self.vocabulary = tuple(lengths), num_sequences, vocabulary

    @classmethod
    @abstractmethod
    def from_options(
        cls, options: EvaluationOptions, lengths: Sequence[int], num_sequences: int, tokenizer: Tokenizer
    ) -> Self:
        """Build the probe from the options.

        Raises:
            UserError: the probe does not support an option.
        """

    @property
    def sequence_lengths(self) -> Sequence[int]:
        return self.lengths

    @property
    @abstractmethod
    def num_scored_tokens(self) -> int:
        """Number of targets at the end of each window."""

    @property
    @abstractmethod
    def min_length(self) -> int:
        """Length of the shortest window, in tokens."""

    @abstractmethod
    def list_axis_values(self, length: int) -> tuple[float, ...]:
        """Return the axis values for windows of a length; empty if the windows are too short."""

    @abstractmethod
    def build_sequences(self, length: int, axis_value: float) -> np.ndarray:
        """Build sequences, int64 [N, L + 1], that contain the inputs and, shifted by one, the targets.

        The last `num_scored_tokens + 1` tokens are the same for all axis values and lengths.
        """

    @property
    @abstractmethod
    def remark(self) -> str:
        """Notes below every table, in full sentences."""

    def check_lengths(self) -> None:
        """Check that every length has an axis value.

        Raises:
            UserError: a length is too short.
        """
        for length in self.lengths:
            if length < self.min_length:
                raise UserError(
                    f"protocol {self.name}: windows of {length:,} tokens are too short; they must be at least "
                    f"{self.min_length:,}"
                )

    def count_flops(self, model: GPT) -> dict[int, float]:
        num_sequences = {length: self.num_sequences * len(self.list_axis_values(length)) for length in self.lengths}
        return count_flops_by_length(model, num_sequences)

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Compute the loss for each axis value and each length that the model supports.

        Raises:
            UserError, RunError: as for `EvalTarget.score`.
        """
        from megatron.evaluation.perplexity import compute_window_losses

        flops_by_length = self.count_flops(loaded.model)
        shared = {**describe_model(loaded), **scoring.record_fields, **self._record_fields()}
        records: list[Record] = []
        done, total = 0.0, sum(flops_by_length.values())
        for length, length_flops in flops_by_length.items():
            axis_values = self.list_axis_values(length)
            flops = length_flops / len(axis_values)
            for axis_value in axis_values:
                sequences = self.build_sequences(length, axis_value)
                starts = np.arange(self.num_sequences, dtype=np.int64) * (length + 1)
                stop_stopwatch = start_stopwatch(loaded.model)
                losses = compute_window_losses(
                    loaded.model,
                    sequences.reshape(-1),
                    starts,
                    length,
                    self.num_scored_tokens,
                    batch_tokens=scoring.batch_tokens,
                )
                if not np.isfinite(losses).all():
                    where = f"{self.axis} {axis_value:g} of length {length:,}"
                    raise RunError(f"{shared['method']}: the loss at {where} is not finite")
                done += flops
                scoring.progress(length, done, total)
                place = {"axis": self.axis, "place": float(axis_value)}
                fields: dict[str, Any] = {"metric": "loss", "length": length, "flops": flops, **place}
                records.append(Record(**shared, **fields, **stop_stopwatch(), **_build_loss_fields(losses)))
        return records

    def build_baseline_records(self) -> list[Record]:
        return []

    def _record_fields(self) -> dict[str, Any]:
        longest = self.lengths[-1]
        targets = self.build_sequences(longest, self.list_axis_values(longest)[0])[:, -self.num_scored_tokens :]
        source = f"{self.name} {self.vocabulary.name}".encode()
        digest = hashlib.sha256(source + targets.astype("<i8").tobytes())
        return {
            "protocol": self.name,
            "targets": self.num_scored_tokens,
            "windows": self.num_sequences,
            "blocks": self.num_sequences,
            "dataset": f"probe {self.name}",
            "text_digest": hashlib.sha256(source).hexdigest()[:16],  # independent of the number of sequences
            "target_digest": digest.hexdigest()[:16],
            "tokenizer": self.vocabulary.name,
            "remark": self.remark,
        }


def _build_loss_fields(losses: np.ndarray) -> dict[str, Any]:
    """Return the record fields of losses [N, targets], with sequences as independent samples."""
    sums, counts = losses.sum(axis=1), np.full(len(losses), losses.shape[1])
    summary, draws = summarize_losses(sums, counts), draw_bootstrap_means(sums[None], counts)
    fields: dict[str, Any] = {"value": summary.nll, "nll": summary.nll, "tokens": summary.tokens}
    if draws is not None:
        low, high = compute_percentile_interval(draws[0])
        fields |= {"stderr": summary.stderr, "low": low, "high": high}
    return fields


DEFAULT_NUM_COPIED = 16
"""Default number of tokens to copy."""


class RepeatedTokens(Probe):
    """Random tokens, the last of which repeat the tokens `distance` positions earlier.

    Args:
        lengths, num_sequences, vocabulary: as for every probe.
        num_copied: number of repeated tokens.
    """

    name, axis = "repeated", "distance"

    def __init__(self, lengths: Sequence[int], num_sequences: int, vocabulary: Vocabulary, num_copied: int) -> None:
        super().__init__(lengths, num_sequences, vocabulary)
        self.num_copied = num_copied

    @classmethod
    def from_options(
        cls, options: EvaluationOptions, lengths: Sequence[int], num_sequences: int, tokenizer: Tokenizer
    ) -> Self:
        for name in ("depths", "score_threshold"):
            if getattr(options, name) is not None:
                raise UserError(f"{name}: protocol repeated uses distances, not depths; omit it")
        num_copied, *more = options.targets or [DEFAULT_NUM_COPIED]
        if more:
            raise UserError("targets: protocol repeated copies one number of tokens; give one number")
        return cls(lengths, num_sequences, build_vocabulary(tokenizer), num_copied)

    @property
    def num_scored_tokens(self) -> int:
        return self.num_copied

    @property
    def remark(self) -> str:
        chance = math.log(self.vocabulary.size - (self.vocabulary.eod is not None))
        return (
            f"The last {self.num_copied} tokens of a window of random tokens are scored. They repeat earlier tokens at "
            f"the given distance. A model that does not copy has a loss of at least {chance:.2f}."
        )

    @property
    def min_length(self) -> int:
        return 2 * self.num_copied + 1

    def list_axis_values(self, length: int) -> tuple[float, ...]:
        """Return doubles of the copy's length with room for both copies, and the range of distances.

        The range is given by the smallest and largest possible distance.
        """
        if length < self.min_length:
            return ()
        min_distance, max_distance = self.num_copied + 1, length - self.num_copied
        distances = {float(min_distance), float(max_distance)}
        distance = 2 * self.num_copied
        while distance < max_distance:
            distances.add(float(distance))
            distance *= 2
        return tuple(sorted(distances))

    def build_sequences(self, length: int, axis_value: float) -> np.ndarray:
        copy = self._sample_tokens(self.num_copied + 1, 0)
        sequences = self._sample_tokens(length + 1, length)
        first = length - self.num_copied - round(axis_value)
        sequences[:, first : first + self.num_copied + 1] = copy
        sequences[:, -self.num_copied - 1 :] = copy
        return sequences

    def _sample_tokens(self, num_tokens: int, stream: int) -> np.ndarray:
        """Sample tokens [N, num_tokens], uniform over the vocabulary except the end-of-document token."""
        generator = np.random.Generator(np.random.PCG64([PROBE_SEED, stream]))
        eod = self.vocabulary.eod
        tokens = generator.integers(self.vocabulary.size - (eod is not None), size=(self.num_sequences, num_tokens))
        return tokens if eod is None else tokens + (tokens >= eod)
