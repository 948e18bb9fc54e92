"""Bucket sort: symbols in order."""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction


class BucketSort(Transduction):
    """n symbols of 0 to 4; the same, sorted."""

    title = "n symbols of five, sorted"
    level = "C"
    order_free = True
    inputs = 5
    outputs = 5

    def output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = generator.integers(5, size=(count, length))
        return given, np.sort(given, axis=1)
