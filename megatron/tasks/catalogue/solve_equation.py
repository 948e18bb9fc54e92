"""Solve equation: the digit that x stands for."""

import numpy as np

from megatron.tasks.grammar import CLOSE, MODULUS, OPEN, sample_expressions
from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction

OPEN_HERE, CLOSE_HERE, UNKNOWN, EQUALS = range(7, 11)
"""The symbols that follow the digits, + and −; there is no ×."""


class SolveEquation(Transduction):
    """An expression with + and − of n − 2 symbols, one of its digits replaced by x, then = and the value modulo 5.

    Which digit: from a uniform place to the right, from the end on at the beginning, to the first digit. So digits that
    follow many other symbols are replaced more often. For n < 3 input and output are zeros.
    """

    title = "the digit that x stands for in an equation modulo 5"
    level = "D"
    inputs = 11
    outputs = 5

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = np.zeros((count, length), dtype=np.int64)
        if length < 3:
            return given, given[:, :1]
        size = length - 2
        symbols, values = sample_expressions(generator, count, size, operators=2)
        starts = generator.integers(size, size=(count, 1))
        onwards = (starts + np.arange(size)) % size
        digits = np.take_along_axis(symbols, onwards, axis=1) < MODULUS
        chosen = np.take_along_axis(onwards, digits.argmax(axis=1)[:, None], axis=1)
        wanted = np.take_along_axis(symbols, chosen, axis=1)
        symbols[symbols == OPEN], symbols[symbols == CLOSE] = OPEN_HERE, CLOSE_HERE
        np.put_along_axis(symbols, chosen, UNKNOWN, axis=1)
        given[:, :size], given[:, size], given[:, size + 1] = symbols, EQUALS, values
        return given, wanted
