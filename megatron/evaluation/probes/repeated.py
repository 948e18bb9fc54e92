"""Random tokens, the last of which stood once before: how far back can a model copy from?

Olsson et al. (2022, 2209.11895) measure induction heads on random tokens that are repeated.

N sequences, L window length.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from megatron.data.tokenizers import Tokenizer
from megatron.data.vocabulary import Vocabulary, vocabulary_from_tokenizer
from megatron.evaluation.probes.probe import PROBE_SEED, Probe
from megatron.options.evaluation import EvaluationOptions
from megatron.utils.errors import UserError

DEFAULT_COPIED = 16
"""Tokens that are copied, unless said otherwise."""


class RepeatedTokens(Probe):
    """Random tokens; the last ones stood `distance` tokens before already.

    Args:
        lengths, count, vocabulary: as of every probe.
        copied: how many tokens those are.
    """

    name, axis = "repeated", "distance"

    def __init__(self, lengths: Sequence[int], count: int, vocabulary: Vocabulary, copied: int) -> None:
        super().__init__(lengths, count, vocabulary)
        self.copied = copied

    @classmethod
    def from_options(cls, options: EvaluationOptions, lengths: Sequence[int], count: int, tokenizer: Tokenizer) -> Self:
        copied, *more = options.targets or [DEFAULT_COPIED]
        if more:
            raise UserError("targets: protocol repeated copies one number of tokens; give one")
        return cls(lengths, count, vocabulary_from_tokenizer(tokenizer), copied)

    @property
    def num_scored_tokens(self) -> int:
        return self.copied

    @property
    def describe_remark(self) -> str:
        chance = math.log(self.vocabulary.size - (self.vocabulary.eod is not None))
        return (
            f"The last {self.copied} tokens of a window of random tokens, each of which followed the token before it "
            f"once already, so many tokens back; a model that copies nothing cannot be below {chance:.2f}."
        )

    @property
    def min_length(self) -> int:
        return 2 * self.copied + 1

    def list_axis_values(self, length: int) -> tuple[float, ...]:
        """Doubles of the copy's length that leave room for both copies, and the largest distance there is."""
        if length < self.min_length:
            return ()
        least, most = self.copied + 1, length - self.copied
        found = {float(least), float(most)}
        distance = 2 * self.copied
        while distance < most:
            found.add(float(distance))
            distance *= 2
        return tuple(sorted(found))

    def build_sequences(self, length: int, axis_value: float) -> np.ndarray:
        copy = self._sample_tokens(self.copied + 1, 0)
        made = self._sample_tokens(length + 1, length)
        first = length - self.copied - round(axis_value)
        made[:, first : first + self.copied + 1] = copy
        made[:, -self.copied - 1 :] = copy
        return made

    def _sample_tokens(self, tokens: int, stream: int) -> np.ndarray:
        """[N, tokens], uniform on the vocabulary but for the end of documents."""
        generator = np.random.Generator(np.random.PCG64([PROBE_SEED, stream]))
        eod = self.vocabulary.eod
        drawn = generator.integers(self.vocabulary.size - (eod is not None), size=(self.count, tokens))
        return drawn if eod is None else drawn + (drawn >= eod)
