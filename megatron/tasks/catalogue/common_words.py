"""Common words: those of a list that come more often than the others."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.options.section import config_field
from megatron.tasks.needle_task import RulerTask, build_question_batch
from megatron.tasks.sampling import sample_distinct
from megatron.tasks.task import TaskBatch


class CommonWords(RulerTask):
    """A list of n words in any order: a few come often, all others seldom; the frequent ones are asked for (RULER's
    cwe).

    They are asked for in the order in which they first come (RULER takes any), each after the right ones before it. A
    longer list has more of the seldom words, and the frequent ones no more often. RULER's numbers for short texts are
    10 common words, 6 times each among words that come once.

    Vocabulary: words, the question mark.
    """

    title = "the words that come often in a list of n words"

    num_cw: int = config_field(3, "common words", ge=1, le=10**4)
    freq_cw: int = config_field(6, "times that a common word comes", ge=2, le=10**4)
    freq_ucw: int = config_field(1, "times that another word comes", ge=1, le=10**4)
    vocabulary: int = config_field(2048, "different words; a list of n words has about n", ge=2, le=10**6)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.freq_ucw >= self.freq_cw:
            raise ValueError(f"freq_ucw is {self.freq_ucw}; it must be less than freq_cw, {self.freq_cw}")
        if self.num_cw > self.vocabulary:
            raise ValueError(f"num_cw is {self.num_cw}, but there are {self.vocabulary} words")
        return self

    @property
    def vocab_size(self) -> int:
        return self.vocabulary + 1

    @property
    def answer_ids(self) -> range:
        return range(self.vocabulary)

    def unsupported_length_reason(self, length: int) -> str | None:
        common = self.num_cw * self.freq_cw
        if length < common or (length - common) % self.freq_ucw:
            return f"lists have {common} words and a multiple of {self.freq_ucw} more"
        if self.num_cw + (length - common) // self.freq_ucw > self.vocabulary:
            return f"it needs more words than there are, {self.vocabulary} (task_options.vocabulary)"
        return None

    def sequence_length(self, length: int) -> int:
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

    def baseline_accuracies(self, length: int) -> dict[str, float]:
        # One of the words that are left, each as likely as it is frequent, and right if it is the next.
        left = [length - self.freq_cw * done for done in range(self.num_cw)]
        return {"any word of the list": sum(self.freq_cw / rest for rest in left) / self.num_cw}
