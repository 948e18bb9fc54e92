"""Parity: is the number of ones odd?"""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction, sample_bits


class ParityCheck(Transduction):
    """n bits; the number of ones modulo 2."""

    title = "is the number of ones among n bits odd"
    level = "R"
    order_free = True
    inputs = 2
    outputs = 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = sample_bits(generator, count, length)
        return given, given.sum(axis=1, keepdims=True) % 2
