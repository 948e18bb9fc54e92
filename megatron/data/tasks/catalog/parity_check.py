"""Parity of the number of ones."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import Array, TransductionTask


class ParityCheck(TransductionTask):
    """n bits; the answer is the number of ones modulo 2."""

    title = "the parity of the number of ones among n bits"
    chomsky_level = "R"
    permutation_invariant = True
    num_input_symbols = 2
    num_output_symbols = 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = sample_bits(generator, count, length)
        return inputs, inputs.sum(axis=1, keepdims=True) % 2
