"""Odds first: every second bit, then the others."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import Array, TransductionTask


class OddsFirst(TransductionTask):
    """Task of n bits whose answer is the 2nd, 4th, … bit, then the 1st, 3rd and so on.

    This is the order in the papers' code; their description states the other order.
    """

    title = "the 2nd, 4th, … of n bits, then the 1st, 3rd, …"
    chomsky_level = "C"
    num_input_symbols = 2
    num_output_symbols = 2

    def get_output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = sample_bits(generator, count, length)
        return inputs, np.concatenate([inputs[:, 1::2], inputs[:, ::2]], axis=1)
