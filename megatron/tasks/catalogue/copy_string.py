"""Copying: a string of letters, and then the same again."""

import numpy as np

from megatron.tasks.autoregressive_task import AutoregressiveTask
from megatron.tasks.task import TaskBatch


class CopyString(AutoregressiveTask):
    """`$ string | string .`: n uniform letters; after the bar the same letters and a full stop are asked for."""

    title = "n letters again, and a full stop"

    def sequence_length(self, length: int) -> int:
        return 2 * length + 2

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        string = generator.integers(self.letters, size=(count, length))
        begin, separator = np.full((count, 1), self.begin_token), np.full((count, 1), self.separator_token)
        return self.build_batch(np.concatenate([begin, string, separator], axis=1), string)
