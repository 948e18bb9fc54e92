"""Modular arithmetic with brackets: the value of an expression modulo 5."""

import numpy as np

from megatron.data.tasks.sampling import sample_expressions
from megatron.data.tasks.task import Array, TransductionTask


class ModularArithmeticBrackets(TransductionTask):
    """Expression of n symbols with +, −, and ×; the answer is its value modulo 5 (`sampling.sample_expressions`).

    Like the papers' code, this alphabet has an eleventh symbol that is never drawn.
    """

    title = "the value modulo 5 of an expression with brackets"
    chomsky_level = "D"
    num_input_symbols = 11
    num_output_symbols = 5

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs, values = sample_expressions(generator, count, length, operators=3)
        return inputs, values[:, None]
