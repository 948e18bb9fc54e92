"""Even pairs: is the number of neighbours that differ even or odd?"""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction, sample_bits


class EvenPairs(Transduction):
    """n bits; the parity of the number of unequal neighbours, which is whether the first and the last differ."""

    title = "is the number of unequal neighbours among n bits odd"
    level = "R"
    inputs = 2
    outputs = 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = sample_bits(generator, count, length)
        return given, (given[:, :1] + given[:, -1:]) % 2
