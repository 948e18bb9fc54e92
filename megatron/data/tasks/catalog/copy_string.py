"""Copying of a string of letters."""

import numpy as np

from megatron.data.tasks.task import StringTask, TaskBatch


class CopyString(StringTask):
    """`$ string | string .`: n uniform letters; the answer after the bar is the same letters and a stop token."""

    title = "n letters, copied, and a stop token"

    def get_sequence_length(self, length: int) -> int:
        return 2 * length + 2

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        string = generator.integers(self.letters, size=(count, length))
        return self.build_string_batch(string, string)
