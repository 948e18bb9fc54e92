"""Duplicate string: bits twice."""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction, sample_bits


class DuplicateString(Transduction):
    """n bits; the same twice, so 2n outputs."""

    title = "n bits twice"
    level = "C"
    inputs = 2
    outputs = 2

    def output_length(self, length: int) -> int:
        return 2 * length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = sample_bits(generator, count, length)
        return given, np.concatenate([given, given], axis=1)
