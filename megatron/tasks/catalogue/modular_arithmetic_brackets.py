"""Modular arithmetic in brackets: the value of an expression modulo 5."""

import numpy as np

from megatron.tasks.grammar import sample_expressions
from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction


class ModularArithmeticBrackets(Transduction):
    """An expression of exactly n symbols with +, − and ×, see `megatron.tasks.grammar`; its value modulo 5.

    The papers' code has an eleventh symbol that is never drawn; so has this alphabet.
    """

    title = "the value modulo 5 of an expression in brackets"
    level = "D"
    inputs = 11
    outputs = 5

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given, values = sample_expressions(generator, count, length, operators=3)
        return given, values[:, None]
