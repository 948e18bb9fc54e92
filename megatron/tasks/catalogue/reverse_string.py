"""Reverse string: bits backwards."""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction, sample_bits


class ReverseString(Transduction):
    """n bits; the same from the last to the first."""

    title = "n bits backwards"
    level = "D"
    inputs = 2
    outputs = 2

    def output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = sample_bits(generator, count, length)
        return given, given[:, ::-1]
