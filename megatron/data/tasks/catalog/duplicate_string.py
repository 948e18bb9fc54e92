"""Duplicate string: bits twice."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import Array, TransductionTask


class DuplicateString(TransductionTask):
    """n bits; the answer is the same string twice, with 2n outputs."""

    title = "n bits, twice"
    chomsky_level = "C"
    num_input_symbols = 2
    num_output_symbols = 2

    def get_output_length(self, length: int) -> int:
        return 2 * length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = sample_bits(generator, count, length)
        return inputs, np.concatenate([inputs, inputs], axis=1)
