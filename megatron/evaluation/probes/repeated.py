"""Probe with repeated random tokens: it measures from how far back a model can copy.

Olsson et al. (2022, 2209.11895) measure induction heads on repeated random tokens.

N sequences, L window length.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from megatron.data.load_tokenizer import Vocabulary, vocabulary_from_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.probes.probe import PROBE_SEED, Probe
from megatron.options.evaluation import EvaluationOptions
from megatron.utils.errors import UserError

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
        if options.depths is not None or options.effective_score is not None:
            raise UserError("depths: protocol repeated uses distances, not depths; omit it")
        num_copied, *more = options.targets or [DEFAULT_NUM_COPIED]
        if more:
            raise UserError("targets: protocol repeated copies one number of tokens; expected one number")
        return cls(lengths, num_sequences, vocabulary_from_tokenizer(tokenizer), num_copied)

    @property
    def num_scored_tokens(self) -> int:
        return self.num_copied

    @property
    def remark(self) -> str:
        chance = math.log(self.vocabulary.size - (self.vocabulary.eod is not None))
        return (
            f"Scored are the last {self.num_copied} tokens of a window of random tokens, which repeat earlier tokens "
            f"at the given distance. A model that does not copy cannot be below {chance:.2f}."
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
