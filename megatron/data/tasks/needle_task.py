"""Needles in a haystack: values of keys hidden in noise (the four variants of RULER)."""

from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.sampling import insert_statements, sample_distinct
from megatron.data.tasks.task import Array, Task, TaskBatch
from megatron.options.section import config_field


class RulerTask(Task):
    """Small version of a task of RULER (2404.06654)."""

    paper = "Hsieh et al. (2024), RULER"
    scores_exact_match = True
    note = "Words are generated and answers are scored at fixed positions: scores are not comparable with RULER's."


class NeedleTask(RulerTask):
    """Needles are keys, each followed by a value; after the haystack some of the keys are queried.

        · · k₂ v · · · k₁ v · k₁ v · ·   ? k₁ v v   ? k₂ v …

    RULER's generator has the same three parameters: keys, values per key, and queried keys. Its four tasks are four
    settings of them. The values of a key are expected in order of occurrence. The model receives the correct values
    before each expected one, so `exact_match` equals the accuracy of greedy decoding. The length of the haystack is the
    input length. The question is the same at every length.

    Vocabulary: noise words, keys, values, question mark. All keys of a sequence are distinct, and so are all values.
    """

    has_depth = True

    num_needle_k: int = config_field(1, "number of keys with needles", ge=1, le=10**4)
    num_needle_v: int = config_field(1, "number of values per key, with a needle for each", ge=1, le=10**4)
    num_needle_q: int = config_field(1, "number of queried keys", ge=1, le=10**4)
    haystack: Literal["noise", "needles"] = config_field(
        "noise", "tokens between the needles: noise words, or as many needles of other keys as fit"
    )
    noise_words: int = config_field(32, "number of different noise words", ge=1, le=10**6)
    keys: int = config_field(64, "number of different keys", ge=1, le=10**6)
    values: int = config_field(64, "number of different values", ge=2, le=10**6)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.num_needle_q > self.num_needle_k:
            raise ValueError(f"num_needle_q is {self.num_needle_q}, but num_needle_k is {self.num_needle_k}")
        if self.num_needle_k > self.keys:
            raise ValueError(f"num_needle_k is {self.num_needle_k}, but keys is {self.keys}")
        if self.num_needles > self.values:
            raise ValueError(f"{self.num_needles} needles need that many values, but there are {self.values}")
        return self

    @property
    def num_needles(self) -> int:
        """Number of needles of the keys that may be queried."""
        return self.num_needle_k * self.num_needle_v

    @property
    def question_token(self) -> int:
        """Token before each queried key."""
        return self.noise_words + self.keys + self.values

    @property
    def vocab_size(self) -> int:
        return self.question_token + 1

    @property
    def answer_ids(self) -> range:
        return range(self.noise_words + self.keys, self.question_token)

    def describe_unsupported_length(self, length: int) -> str | None:
        if length < 2 * self.num_needles:
            return f"{self.num_needles} needles need a haystack of at least {2 * self.num_needles} tokens"
        if self._count_distractors(length) > self.keys - self.num_needle_k:
            return f"it has room for {length // 2} needles, but there are {self.keys} keys (task_options.keys)"
        return None

    def get_sequence_length(self, length: int) -> int:
        return length + self.num_needle_q * (2 + self.num_needle_v) - 1

    def _count_distractors(self, length: int) -> int:
        return length // 2 - self.num_needles if self.haystack == "needles" else 0

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        num_keys, num_asked = self.num_needle_k, self.num_needle_q
        keys, values, others = self._draw_words(generator, count, length)
        needles = self._mix_needles(generator, keys, values, others)
        haystack = insert_statements(generator, needles, length, self.noise_words)
        asked = sample_distinct(generator, count, num_asked, num_keys)
        return self._append_questions(haystack, keys, values, asked)

    def sample_batch_at_depth(self, generator: np.random.Generator, count: int, length: int, depth: float) -> TaskBatch:
        """Sample sequences with the needles of the first queried key at a depth.

        These needles are consecutive. Other needles are placed anywhere, but the key and value of a needle are never
        separated, so the depth may be off by one token.
        """
        num_values = self.num_needle_v
        keys, values, others = self._draw_words(generator, count, length)
        needles = self._mix_needles(generator, keys[:, 1:], values[:, num_values:], others)
        haystack = insert_statements(generator, needles, length - 2 * num_values, self.noise_words)
        own = np.stack([np.repeat(keys[:, :1], num_values, axis=1), values[:, :num_values]], axis=2).reshape(count, -1)
        start = round(depth * haystack.shape[1])
        splits = (haystack[:, start : start + 1] >= self.answer_ids.start).any(axis=1)
        rows = [
            np.concatenate([row[:first], needle, row[first:]])
            for row, needle, first in zip(haystack, own, start + splits, strict=True)
        ]
        rest = 1 + sample_distinct(generator, count, self.num_needle_q - 1, self.num_needle_k - 1)
        asked = np.concatenate([np.zeros((count, 1), dtype=np.int64), rest], axis=1)
        return self._append_questions(np.stack(rows), keys, values, asked)

    def _draw_words(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array, Array]:
        """Sample keys [B, K + D] with D distractors at the end, values [B, K·V] by key, and values of distractors."""
        distractors = self._count_distractors(length)
        keys = self.noise_words + sample_distinct(generator, count, self.num_needle_k + distractors, self.keys)
        values = self.answer_ids.start + sample_distinct(generator, count, self.num_needles, self.values)
        return keys, values, self.answer_ids.start + generator.integers(self.values, size=(count, distractors))

    def _mix_needles(self, generator: np.random.Generator, keys: Array, values: Array, others: Array) -> Array:
        """Shuffle the needles, [B, needles, 2].

        A key occurs once for each of its values, and its values keep their order.
        """
        count, distractors = others.shape
        num_keys = keys.shape[1] - distractors
        owners = np.concatenate([np.repeat(np.arange(num_keys), self.num_needle_v), num_keys + np.arange(distractors)])
        owners = generator.permuted(np.tile(owners, (count, 1)), axis=1)
        by_owner = np.argsort(owners, axis=1, kind="stable")
        placed = np.zeros_like(owners)
        np.put_along_axis(placed, by_owner, np.concatenate([values, others], axis=1), axis=1)
        return np.stack([np.take_along_axis(keys, owners, axis=1), placed], axis=2)

    def _append_questions(self, haystack: Array, keys: Array, values: Array, asked: Array) -> TaskBatch:
        """Build sequences from haystacks [B, n] and indices of queried keys [B, Q]."""
        count, num_asked = asked.shape
        values = values.reshape(count, self.num_needle_k, self.num_needle_v)
        question = np.concatenate(
            [
                np.full((count, num_asked, 1), self.question_token),
                np.take_along_axis(keys, asked, axis=1)[:, :, None],
                np.take_along_axis(values, asked[:, :, None], axis=1),
            ],
            axis=2,
        )
        return build_question_batch(haystack, question)

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        # With a single needle its value would be the answer.
        return {"one of the needles' values": 1 / self.num_needles} if self.num_needles > 1 else {}


def build_question_batch(haystack: Array, questions: Array, given: int = 2) -> TaskBatch:
    """Build sequences from haystacks [B, n] and questions [B, q, given + answers].

    The first `given` tokens of a question are a mark and the query. Each answer is expected after the token before it.
    The last token is not an input.
    """
    count, length = haystack.shape
    tokens = np.concatenate([haystack, questions.reshape(count, -1)], axis=1)
    mask = np.zeros(tokens.shape, dtype=bool)
    mask[:, length:].reshape(questions.shape)[:, :, given - 1 : -1] = True
    # Labels outside the mask can be any answer id.
    labels = np.where(mask, np.roll(tokens, -1, axis=1), questions[:, :1, -1])
    return TaskBatch(tokens[:, :-1], labels[:, :-1], mask[:, :-1], mask[:, :-1])
