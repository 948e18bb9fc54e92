"""Odds first: every second bit, then the others."""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction, sample_bits


class OddsFirst(Transduction):
    """n bits; the 2nd, 4th, … of them, then the 1st, 3rd, …

    This is what the papers' code does; its description says the other order.
    """

    title = "the 2nd, 4th, … of n bits, then the 1st, 3rd, …"
    level = "C"
    inputs = 2
    outputs = 2

    def output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = sample_bits(generator, count, length)
        return given, np.concatenate([given[:, 1::2], given[:, ::2]], axis=1)
