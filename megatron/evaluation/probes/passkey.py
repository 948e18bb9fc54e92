"""Five digits hidden in filler, asked for at the end: at which depth does a model find them?

Mohtashami and Jaggi (2023, 2305.16300) look whether models write them; small models write nothing of the kind, so here
it is the digits' likelihood.

N sequences, L window length.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Self

import numpy as np

from megatron.data.tokenizers import Tokenizer
from megatron.data.vocabulary import vocabulary_from_tokenizer
from megatron.evaluation.probes.probe import PROBE_SEED, Probe
from megatron.options.evaluation import EvaluationOptions
from megatron.utils.errors import UserError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the key: the share of the filler that stands before it."""

# The wording of 2305.16300, section 4.2, *unchecked*.
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is "

DIGITS_SAMPLED = 20
"""Keys that are drawn for each that is taken: of most tokenizers all can be."""


class Passkey(Probe):
    """Five digits in filler, asked for at the end.

    Args:
        lengths, count: as of every probe.
        tokenizer: of the models.

    Raises:
        UserError: the tokenizer has too few keys of as many tokens, or none that is a token of its own.
    """

    name, axis = "passkey", "depth"

    def __init__(self, lengths: Sequence[int], count: int, tokenizer: Tokenizer) -> None:
        super().__init__(lengths, count, vocabulary_from_tokenizer(tokenizer))
        self.tokenizer = tokenizer
        generator = np.random.Generator(np.random.PCG64(PROBE_SEED))
        keys = [f"{key:05d}" for key in generator.permutation(100_000)[: DIGITS_SAMPLED * count].tolist()]
        answers = {key: answer for key in keys if (answer := self._answer(key))}
        if not answers:
            raise UserError(
                f"protocol passkey: tokenizer {tokenizer.name} reads the end of the question otherwise where a key "
                "follows it, so that no tokens are the key's alone"
            )
        # Every window has as many targets: of a tokenizer that joins digits, keys with the usual number of tokens.
        ((usual, _),) = Counter(map(len, answers.values())).most_common(1)
        alike = ((key, answer) for key, answer in answers.items() if len(answer) == usual)
        self.answers = dict(islice(alike, count))
        if len(self.answers) < count:
            raise UserError(f"protocol passkey: tokenizer {tokenizer.name} has too few keys of as many tokens")

    @classmethod
    def from_options(cls, options: EvaluationOptions, lengths: Sequence[int], count: int, tokenizer: Tokenizer) -> Self:
        if options.targets is not None:
            raise UserError("targets: protocol passkey scores the key's digits; leave it out")
        return cls(lengths, count, tokenizer)

    def _answer(self, key: str) -> list[int]:
        """The tokens that the key adds to the question; none if the question is not read as it is alone."""
        whole, asked = list(self.tokenizer.encode(QUESTION + key)), self._asked()
        return whole[len(asked) :] if whole[: len(asked)] == asked else []

    def _asked(self) -> list[int]:
        """The question without the space that belongs to the key's first token."""
        return list(self.tokenizer.encode(QUESTION.rstrip()))

    @property
    def num_scored_tokens(self) -> int:
        return len(next(iter(self.answers.values())))

    @property
    def describe_remark(self) -> str:
        return (
            "The five digits of a pass key (and the space before them) at the end of the window; the key stands in the "
            "filler at that share of it. Guessed digits have ln 10 = 2.30 for each token of one digit."
        )

    def list_axis_values(self, length: int) -> tuple[float, ...]:
        return DEPTHS if length >= self.min_length else ()

    @property
    def min_length(self) -> int:
        key = next(iter(self.answers))
        return len(self.tokenizer.encode_with_bos(NEEDLE.format(key=key) + QUESTION)) + 2 * self.num_scored_tokens

    def build_sequences(self, length: int, axis_value: float) -> np.ndarray:
        filler, asked = list(self.tokenizer.encode(FILLER)), self._asked()
        begin = self.tokenizer.encode_with_bos("")
        rows = []
        for key, answer in self.answers.items():
            needle = list(self.tokenizer.encode(NEEDLE.format(key=key)))
            room = length + 1 - len(begin) - len(needle) - len(asked) - len(answer)
            before = round(axis_value * room)
            padding = (filler * (room // len(filler) + 1))[:room]
            rows.append([*begin, *padding[:before], *needle, *padding[before:], *asked, *answer])
        return np.array(rows, dtype=np.int64)
