"""Random tokens, the last of which stood once before: how far back can a model copy from?

Olsson et al. (2022, 2209.11895) measure induction heads on random tokens that are repeated.

N sequences, L window length.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from megatron.data.tokenizers import Tokenizer
from megatron.data.vocabulary import Vocabulary, vocabulary_of
from megatron.evaluation.probes.probe import SEED, Probe
from megatron.options.evaluation import EvaluationOptions
from megatron.utils.errors import UserError

COPIED = 16
"""Tokens that are copied, unless said otherwise."""


class Repeated(Probe):
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
    def of(cls, options: EvaluationOptions, lengths: Sequence[int], count: int, tokenizer: Tokenizer) -> Self:
        copied, *more = options.targets or [COPIED]
        if more:
            raise UserError("targets: protocol repeated copies one number of tokens; give one")
        return cls(lengths, count, vocabulary_of(tokenizer), copied)

    @property
    def scored(self) -> int:
        return self.copied

    @property
    def remark(self) -> str:
        chance = math.log(self.vocabulary.size - (self.vocabulary.eod is not None))
        return (
            f"The last {self.copied} tokens of a window of random tokens, each of which followed the token before it "
            f"once already, so many tokens back; a model that copies nothing cannot be below {chance:.2f}."
        )

    @property
    def shortest(self) -> int:
        return 2 * self.copied + 1

    def marks(self, length: int) -> tuple[float, ...]:
        """Doubles of the copy's length that leave room for both copies, and the largest distance there is."""
        if length < self.shortest:
            return ()
        least, most = self.copied + 1, length - self.copied
        found = {float(least), float(most)}
        distance = 2 * self.copied
        while distance < most:
            found.add(float(distance))
            distance *= 2
        return tuple(sorted(found))

    def sequences(self, length: int, place: float) -> np.ndarray:
        copy = self._random(self.copied + 1, 0)
        made = self._random(length + 1, length)
        first = length - self.copied - round(place)
        made[:, first : first + self.copied + 1] = copy
        made[:, -self.copied - 1 :] = copy
        return made

    def _random(self, tokens: int, stream: int) -> np.ndarray:
        """[N, tokens], uniform on the vocabulary but for the end of documents."""
        generator = np.random.Generator(np.random.PCG64([SEED, stream]))
        eod = self.vocabulary.eod
        drawn = generator.integers(self.vocabulary.size - (eod is not None), size=(self.count, tokens))
        return drawn if eod is None else drawn + (drawn >= eod)
