"""N-gram lookup: the letters after a given n-gram in a string."""

from typing import Literal

import numpy as np

from megatron.data.tasks.task import Array, StringTask, TaskBatch
from megatron.options.section import config_field

MAX_STARTS_PER_NGRAM = 4
"""Maximum number of letters in a string, relative to the number of n-grams.

Of e^4 strings with this length, one contains a given n-gram only once.
"""


class NgramLookup(StringTask):
    """String of n uniform letters, and an n-gram that occurs in it once; the answer is the `answer` letters after it.

        query: suffix      $ string | ngram answer .
        query: prefix      $ ngram | string | answer .

    The position is uniform among those with room for the answer. In the released code the n-gram may occur several
    times, and the answer follows the first occurrence. Such strings are redrawn here.
    """

    title = "the letters after a given n-gram in a string of n letters"

    ngram: int = config_field(3, "number of given letters", ge=1, le=100)
    answer: int = config_field(8, "number of queried letters", ge=1, le=10**6)
    query: Literal["suffix", "prefix"] = config_field(
        "suffix", "position of the given letters: after or before the string"
    )

    def describe_unsupported_length(self, length: int) -> str | None:
        min_length = self.ngram + self.answer
        if length < min_length:
            return f"{self.ngram} letters and an answer of {self.answer} need a string of at least {min_length}"
        if length > MAX_STARTS_PER_NGRAM * self.letters**self.ngram:
            return f"{self.ngram} of {self.letters} letters rarely occur exactly once in such a string"
        return None

    def get_sequence_length(self, length: int) -> int:
        return length + 2 + self.ngram + self.answer + (self.query == "prefix")

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        string = generator.integers(self.letters, size=(count, length))
        starts = generator.integers(length - self.ngram - self.answer + 1, size=count)
        while (repeated := self._find_repeated(string, starts)).any():
            string[repeated] = generator.integers(self.letters, size=(int(repeated.sum()), length))
        indices = starts[:, None] + np.arange(self.ngram + self.answer)
        ngram, answer = np.split(np.take_along_axis(string, indices, axis=1), [self.ngram], axis=1)
        begin, separator = np.full((count, 1), self.begin_token), np.full((count, 1), self.separator_token)
        suffix = [begin, string, separator, ngram]
        prefix = [begin, ngram, separator, string, separator]
        return self.build_batch(np.concatenate(suffix if self.query == "suffix" else prefix, axis=1), answer)

    def _find_repeated(self, string: Array, starts: Array) -> Array:
        """Return a mask of strings in which the n-gram at `starts` occurs more than once, bool [B]."""
        windows = np.lib.stride_tricks.sliding_window_view(string, self.ngram, axis=1)
        ngrams = windows[np.arange(len(string)), starts]
        return (windows == ngrams[:, None]).all(axis=2).sum(axis=1) > 1
