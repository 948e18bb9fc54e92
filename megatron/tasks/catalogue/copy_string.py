"""Copying: a string of letters, and then the same again."""

import numpy as np

from megatron.tasks.letters import Letters
from megatron.tasks.task import Drawn


class CopyString(Letters):
    """`$ string | string .`: n uniform letters; after the bar the same letters and a full stop are asked for."""

    title = "n letters again, and a full stop"

    def places(self, length: int) -> int:
        return 2 * length + 2

    def draw(self, generator: np.random.Generator, count: int, length: int) -> Drawn:
        string = generator.integers(self.letters, size=(count, length))
        begin, bar = np.full((count, 1), self.begin), np.full((count, 1), self.bar)
        return self.asked_for(np.concatenate([begin, string, bar], axis=1), string)
