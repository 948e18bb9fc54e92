"""Reverse string: bits in reverse order."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import Array, TransductionTask


class ReverseString(TransductionTask):
    """n bits; the answer is the bits in reverse order."""

    title = "n bits in reverse order"
    chomsky_level = "D"
    num_input_symbols = 2
    num_output_symbols = 2

    def get_output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = sample_bits(generator, count, length)
        return inputs, inputs[:, ::-1]
