"""Missing duplicate: the masked bit of a duplicated string."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import Array, TransductionTask

HIDDEN, PADDING = 2, 3


class MissingDuplicate(TransductionTask):
    """A string of ⌊n/2⌋ bits twice, one bit masked by a 2, and a final 3 if n is odd; the answer is the masked bit.

    For n = 1 input and output are 1.
    """

    title = "the masked bit in a string of n/2 bits that occurs twice"
    chomsky_level = "C"
    num_input_symbols = 4
    num_output_symbols = 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        if length == 1:
            return np.ones((count, 1), dtype=np.int64), np.ones((count, 1), dtype=np.int64)
        half = length // 2
        string = sample_bits(generator, count, half)
        inputs = np.concatenate([string, string, np.full((count, length % 2), PADDING)], axis=1)
        hidden = generator.integers(2 * half, size=(count, 1))
        outputs = np.take_along_axis(inputs, hidden, axis=1)
        np.put_along_axis(inputs, hidden, HIDDEN, axis=1)
        return inputs, outputs
