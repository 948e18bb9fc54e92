"""Common words: the words that occur most often in a list."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.needle_task import RulerTask, build_question_batch
from megatron.data.tasks.sampling import sample_distinct
from megatron.data.tasks.task import TaskBatch
from megatron.options.section import config_field


class CommonWords(RulerTask):
    """A shuffled list of n words, a few frequent and all others rare; the answer is the frequent words (RULER's cwe).

    The words are expected in the order of their first occurrence (RULER accepts any order), each given the correct ones
    before it. A longer list has more rare words; the frequent ones do not become more frequent. RULER's numbers for
    short texts are 10 common words with 6 occurrences each, among words that occur once.

    Vocabulary: words, question mark.
    """

    title = "the frequent words of a list of n words"

    num_cw: int = config_field(3, "number of common words", ge=1, le=10**4)
    freq_cw: int = config_field(6, "occurrences of each common word", ge=2, le=10**4)
    freq_ucw: int = config_field(1, "occurrences of each other word", ge=1, le=10**4)
    vocabulary: int = config_field(2048, "number of different words; a list of n words has about n", ge=2, le=10**6)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.freq_ucw >= self.freq_cw:
            raise ValueError(f"freq_ucw is {self.freq_ucw}; it must be less than freq_cw, {self.freq_cw}")
        if self.num_cw > self.vocabulary:
            raise ValueError(f"num_cw is {self.num_cw}, but vocabulary is {self.vocabulary}")
        return self

    @property
    def vocab_size(self) -> int:
        return self.vocabulary + 1

    @property
    def answer_ids(self) -> range:
        return range(self.vocabulary)

    def describe_unsupported_length(self, length: int) -> str | None:
        common = self.num_cw * self.freq_cw
        if length < common or (length - common) % self.freq_ucw:
            return f"lists have {common} words and a multiple of {self.freq_ucw} more"
        if self.num_cw + (length - common) // self.freq_ucw > self.vocabulary:
            return f"it needs more than {self.vocabulary} words (task_options.vocabulary)"
        return None

    def get_sequence_length(self, length: int) -> int:
        return length + self.num_cw

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        num_others = (length - self.num_cw * self.freq_cw) // self.freq_ucw
        words = sample_distinct(generator, count, self.num_cw + num_others, self.vocabulary)
        times = np.repeat([self.freq_cw, self.freq_ucw], [self.num_cw, num_others])
        listed = generator.permuted(np.repeat(words, times, axis=1), axis=1)
        common = words[:, : self.num_cw]
        first = (listed[:, None] == common[:, :, None]).argmax(axis=2)
        common = np.take_along_axis(common, np.argsort(first, axis=1), axis=1)
        mark = np.full((count, 1), self.vocabulary)
        return build_question_batch(listed, np.concatenate([mark, common], axis=1)[:, None], given=1)

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        # A random word of the rest of the list; its probability is its frequency, and it is correct if it is the next
        # answer.
        left = [length - self.freq_cw * done for done in range(self.num_cw)]
        return {"any word of the list": sum(self.freq_cw / rest for rest in left) / self.num_cw}
