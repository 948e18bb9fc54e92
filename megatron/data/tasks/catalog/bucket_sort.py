"""Bucket sort: symbols in order."""

import numpy as np

from megatron.data.tasks.task import Array, TransductionTask


class BucketSort(TransductionTask):
    """n symbols from 0 to 4; the answer is the sorted string."""

    title = "n symbols out of five, sorted"
    chomsky_level = "C"
    permutation_invariant = True
    num_input_symbols = 5
    num_output_symbols = 5

    def get_output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = generator.integers(5, size=(count, length))
        return inputs, np.sort(inputs, axis=1)
