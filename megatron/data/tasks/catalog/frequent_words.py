"""Frequent words: the most frequent words of a text, in order of frequency."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.needle_task import RulerTask, build_question_batch
from megatron.data.tasks.sampling import sample_distinct
from megatron.data.tasks.task import Array, TaskBatch
from megatron.options.section import config_field


class FrequentWords(RulerTask):
    """A shuffled text of n words with zeta frequencies; the answer is the most frequent words (RULER's fwe).

    The word of rank r = 1, 2, … occurs ⌊n·r^(−alpha)/Z⌋ times, where Z is the sum of r^(−alpha) over all ranks. The
    first rank and the remaining tokens are a filler word, as in RULER. The words of the next ranks are expected in
    order of frequency (RULER accepts any order), each given the correct ones before it. All frequencies grow with the
    text.

    Vocabulary: words, filler word, question mark.
    """

    title = "the most frequent words of a text of n words"

    num_words: int = config_field(3, "number of queried words", ge=1, le=10**4)
    alpha: float = config_field(2.0, "exponent of the decay of frequencies with rank", gt=0, le=10)
    vocabulary: int = config_field(64, "number of different words", ge=2, le=10**6)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.num_words >= self.vocabulary:
            raise ValueError(f"num_words is {self.num_words}; it must be less than the vocabulary, {self.vocabulary}")
        return self

    @property
    def vocab_size(self) -> int:
        return self.vocabulary + 2

    @property
    def answer_ids(self) -> range:
        return range(self.vocabulary)

    def count_words(self, length: int) -> Array:
        """Return the number of occurrences of the words of ranks 2, 3, … in a text of a length, int64 [vocabulary]."""
        weights = np.arange(1, self.vocabulary + 2, dtype=np.float64) ** -self.alpha
        return np.floor(length * weights / weights.sum()).astype(np.int64)[1:]

    def describe_unsupported_length(self, length: int) -> str | None:
        asked = self.count_words(length)[: self.num_words + 1]
        if (np.diff(asked) < 0).all():
            return None
        return f"the {self.num_words} most frequent words do not differ in frequency; the text is too short"

    def get_sequence_length(self, length: int) -> int:
        return length + self.num_words

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        times = self.count_words(length)
        words = sample_distinct(generator, count, self.vocabulary, self.vocabulary)
        text = np.full((count, length), self.vocabulary)
        text[:, : times.sum()] = np.repeat(words, times, axis=1)
        text = generator.permuted(text, axis=1)
        mark = np.full((count, 1), self.vocabulary + 1)
        return build_question_batch(text, np.concatenate([mark, words[:, : self.num_words]], axis=1)[:, None], given=1)

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        times = self.count_words(length)
        left = times.sum() - np.concatenate([[0], times.cumsum()[: self.num_words - 1]])
        return {"any word of the text that is left": float((times[: self.num_words] / left).mean())}
