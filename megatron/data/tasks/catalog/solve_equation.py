"""Solve equation: the digit represented by x."""

import numpy as np

from megatron.data.tasks.sampling import CLOSE, MODULUS, OPEN, sample_expressions
from megatron.data.tasks.task import Array, TransductionTask

OPEN_SYMBOL, CLOSE_SYMBOL, UNKNOWN, EQUALS = range(7, 11)
"""Symbols after the digits, +, and −; there is no ×."""


class SolveEquation(TransductionTask):
    """Expression of n − 2 symbols with + and −, one digit replaced by x, followed by = and its value modulo 5.

    The replaced digit is the first one at or after a uniform position, wrapping around at the end. Digits that follow
    many other symbols are therefore replaced more often. For n < 3 input and output are zeros.
    """

    title = "the digit represented by x in an equation modulo 5"
    chomsky_level = "D"
    num_input_symbols = 11
    num_output_symbols = 5

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = np.zeros((count, length), dtype=np.int64)
        if length < 3:
            return inputs, inputs[:, :1]
        size = length - 2
        symbols, values = sample_expressions(generator, count, size, operators=2)
        starts = generator.integers(size, size=(count, 1))
        indices = (starts + np.arange(size)) % size
        digits = np.take_along_axis(symbols, indices, axis=1) < MODULUS
        replaced = np.take_along_axis(indices, digits.argmax(axis=1)[:, None], axis=1)
        outputs = np.take_along_axis(symbols, replaced, axis=1)
        symbols[symbols == OPEN], symbols[symbols == CLOSE] = OPEN_SYMBOL, CLOSE_SYMBOL
        np.put_along_axis(symbols, replaced, UNKNOWN, axis=1)
        inputs[:, :size], inputs[:, size], inputs[:, size + 1] = symbols, EQUALS, values
        return inputs, outputs
