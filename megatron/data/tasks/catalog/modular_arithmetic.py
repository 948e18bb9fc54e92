"""Modular arithmetic without brackets: the value of an expression modulo 5."""

import numpy as np

from megatron.data.tasks.task import Array, TransductionTask

PLUS, MINUS = 5, 6


class ModularArithmetic(TransductionTask):
    """Digit, operator, digit, …; the answer is the value modulo 5, with × before + and −.

    Inputs have odd length, n − 1 for even n. Symbols 0 to 4 are digits, followed by +, −, and ×. Like the papers' code,
    this alphabet has a ninth symbol, a blank that is never drawn.
    """

    title = "the value modulo 5 of digits joined by +, −, and ×"
    chomsky_level = "R"
    num_input_symbols = 9
    num_output_symbols = 5

    def get_input_length(self, length: int) -> int:
        return length - 1 + length % 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        digits = generator.integers(5, size=(count, self.get_input_length(length) // 2 + 1))
        operators = generator.integers(PLUS, PLUS + 3, size=(count, digits.shape[1] - 1))
        inputs = np.zeros((count, self.get_input_length(length)), dtype=np.int64)
        inputs[:, ::2], inputs[:, 1::2] = digits, operators
        total, term = np.zeros(count, dtype=np.int64), digits[:, 0]
        for operator, digit in zip(operators.T, digits.T[1:], strict=True):
            is_sum = operator <= MINUS
            total = np.where(is_sum, total + term, total)
            term = np.where(is_sum, np.where(operator == MINUS, -digit, digit), term * digit % 5)
        return inputs, ((total + term) % 5)[:, None]
