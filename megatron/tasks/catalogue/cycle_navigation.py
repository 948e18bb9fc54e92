"""Cycle navigation: where on a circle of five places do moves end?"""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction


class CycleNavigation(Transduction):
    """n moves on a circle of five places, 0 backwards, 1 none and 2 forwards; the place where they end."""

    title = "where n steps back, none or forward on a circle of five places end"
    level = "R"
    order_free = True
    inputs = 3
    outputs = 5

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = generator.integers(3, size=(count, length))
        return given, (given - 1).sum(axis=1, keepdims=True) % 5
