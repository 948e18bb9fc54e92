"""Cycle navigation: the final position after moves on a cycle of length five."""

import numpy as np

from megatron.data.tasks.task import Array, TransductionTask


class CycleNavigation(TransductionTask):
    """n moves on a cycle of length five (0 backward, 1 none, 2 forward); the answer is the final position."""

    title = "the final position after n steps (back, none, or forward) on a cycle of length five"
    chomsky_level = "R"
    permutation_invariant = True
    num_input_symbols = 3
    num_output_symbols = 5

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = generator.integers(3, size=(count, length))
        return inputs, (inputs - 1).sum(axis=1, keepdims=True) % 5
