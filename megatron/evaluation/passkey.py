"""Passkey retrieval: five digits hidden in filler text, at several depths, with the question at the end.

Mohtashami and Jaggi (2023, 2305.16300) check whether models generate the digits. Here each digit is scored given the
correct digits before it. A model generates the key greedily if and only if every digit is its likeliest token. Small
models never do, but the loss of the digits still shows at which depths they retrieve part of the key.

N sequences, L window length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Self

import numpy as np

from megatron.data.load_tokenizer import build_vocabulary
from megatron.data.tasks.task import TaskBatch
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.needle_map import DEFAULT_EFFECTIVE_SCORE, NeedleMap, hash_depths, score_needle_map
from megatron.evaluation.probe import PROBE_SEED, Probe
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.records import Record
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Default depths: share of the filler text before the key."""

# Wording of 2305.16300, section 4.2, *unchecked*.
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is "

NUM_DIGITS = 5
"""Number of digits of a key."""
KEYS_PER_SEQUENCE = 20
"""Number of candidate keys per sequence. With most tokenizers all of them are usable."""


class Passkey(Probe):
    """Passkey probe, scored as a needle map.

    Args:
        lengths, num_sequences: as for every probe.
        tokenizer: tokenizer of the models.
        depths: depths of the key, ascending.
        effective_score: score that a model must reach at an effective length.

    Raises:
        UserError: the tokenizer yields too few keys of equal token count, or merges the key with the question.
    """

    name, axis = "passkey", "depth"

    def __init__(
        self,
        lengths: Sequence[int],
        num_sequences: int,
        tokenizer: Tokenizer,
        depths: Sequence[float] = DEPTHS,
        effective_score: float = DEFAULT_EFFECTIVE_SCORE,
    ) -> None:
        super().__init__(lengths, num_sequences, build_vocabulary(tokenizer))
        self.tokenizer, self.depths, self.effective_score = tokenizer, tuple(depths), effective_score
        generator = np.random.Generator(np.random.PCG64(PROBE_SEED))
        numbers = generator.permutation(10**NUM_DIGITS)[: KEYS_PER_SEQUENCE * num_sequences].tolist()
        keys = [f"{number:0{NUM_DIGITS}d}" for number in numbers]
        answers = {key: answer for key in keys if (answer := self._encode_answer(key))}
        if not answers:
            raise UserError(
                f"protocol passkey: tokenizer {tokenizer.name} merges the end of the question with the key, "
                "so that no tokens belong to the key alone"
            )
        # All windows need the same number of targets. If the tokenizer merges digits, keep keys with the most common
        # count.
        ((usual_length, _),) = Counter(map(len, answers.values())).most_common(1)
        of_usual_length = ((key, answer) for key, answer in answers.items() if len(answer) == usual_length)
        self.answers = dict(islice(of_usual_length, num_sequences))
        if len(self.answers) < num_sequences:
            raise UserError(
                f"protocol passkey: tokenizer {tokenizer.name} has too few keys with equal numbers of tokens"
            )

    @classmethod
    def from_options(
        cls, options: EvaluationOptions, lengths: Sequence[int], num_sequences: int, tokenizer: Tokenizer
    ) -> Self:
        if options.targets is not None:
            raise UserError("targets: protocol passkey scores the key's digits; omit it")
        depths, effective_score = options.depths or DEPTHS, options.score_threshold or DEFAULT_EFFECTIVE_SCORE
        return cls(lengths, num_sequences, tokenizer, depths, effective_score)

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Score a model on the needle map, and return its records.

        Raises:
            UserError, RunError: as for `EvalTarget.score`.
        """
        return score_needle_map(self._build_needle_map(), loaded, self.count_flops(loaded.model), scoring)

    def _build_needle_map(self) -> NeedleMap:
        fields = self._record_fields()
        fields["target_digest"] = hash_depths(fields["target_digest"], self.depths)
        return NeedleMap(
            lengths=self.lengths,
            depths=self.depths,
            score_metric="exact_match",
            metrics=("loss", "accuracy", "exact_match"),
            is_paired=True,
            choices=None,
            build_batch=self._build_batch,
            record_fields=fields,
            effective_score=self.effective_score,
        )

    def _build_batch(self, length: int, depth: float) -> TaskBatch:
        sequences = self.build_sequences(length, depth)
        is_answer = np.zeros((len(sequences), length), dtype=bool)
        is_answer[:, -self.num_scored_tokens :] = True
        return TaskBatch(sequences[:, :-1], sequences[:, 1:], is_answer, is_answer)

    def _encode_answer(self, key: str) -> list[int]:
        """Return the tokens that the key adds to the question.

        The list is empty if the key changes the question's tokens.
        """
        tokens, question = list(self.tokenizer.encode(QUESTION + key)), self._encode_question()
        return tokens[len(question) :] if tokens[: len(question)] == question else []

    def _encode_question(self) -> list[int]:
        """Tokenize the question without its last space, which belongs to the first token of the key."""
        return list(self.tokenizer.encode(QUESTION.rstrip()))

    @property
    def num_scored_tokens(self) -> int:
        return len(next(iter(self.answers.values())))

    @property
    def remark(self) -> str:
        """Description of the targets, with the loss and the accuracy of a model that guesses the key.

        A guesser knows everything but the key, and gives each key the same probability. By the chain rule, the losses
        of a key's tokens sum to the logarithm of the number of keys with any tokenizer.
        """
        num_tokens = self.num_scored_tokens
        loss = NUM_DIGITS * math.log(10) / num_tokens
        guessing = f"a loss of {NUM_DIGITS} × ln 10 / {num_tokens} = {loss:.2f} per token"
        num_known = int(self._has_own_space)
        if num_tokens == num_known + NUM_DIGITS:  # one token for each digit
            guessing += f" and an accuracy of about {(num_known + NUM_DIGITS / 10) / num_tokens:.0%}"
        return (
            "The space and the five digits of a pass key at the end of the window are scored: "
            f"{num_tokens} token{'' if num_tokens == 1 else 's'}. Depth is the share of the filler before the key. "
            f"A model that guesses the key has {guessing}."
        )

    @property
    def _has_own_space(self) -> bool:
        """True if the space before the key is a token, not a part of the key's first token."""
        space = list(self.tokenizer.encode(QUESTION))[len(self._encode_question()) :]
        return len(space) == 1 and all(answer[0] == space[0] for answer in self.answers.values())

    def list_axis_values(self, length: int) -> tuple[float, ...]:
        return self.depths if length >= self.min_length else ()

    @property
    def min_length(self) -> int:
        key = next(iter(self.answers))
        return len(self.tokenizer.encode_with_bos(NEEDLE.format(key=key) + QUESTION)) + 2 * self.num_scored_tokens

    def build_sequences(self, length: int, axis_value: float) -> np.ndarray:
        filler, question = list(self.tokenizer.encode(FILLER)), self._encode_question()
        bos = self.tokenizer.encode_with_bos("")
        rows = []
        for key, answer in self.answers.items():
            needle = list(self.tokenizer.encode(NEEDLE.format(key=key)))
            num_filler = length + 1 - len(bos) - len(needle) - len(question) - len(answer)
            depth = round(axis_value * num_filler)
            padding = (filler * (num_filler // len(filler) + 1))[:num_filler]
            rows.append([*bos, *padding[:depth], *needle, *padding[depth:], *question, *answer])
        return np.array(rows, dtype=np.int64)
