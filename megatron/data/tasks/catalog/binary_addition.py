"""Binary addition: the sum of two numbers, bit by bit."""

import numpy as np

from megatron.data.tasks.sampling import propagate_carries, sample_number_pairs, terminate_bits
from megatron.data.tasks.task import TERMINATOR_SYMBOL, Array, TransductionTask


class BinaryAddition(TransductionTask):
    """Two binary numbers separated by a 2, lowest bit first; the answer is their sum, the terminator, and zeros.

    For n ≤ 2 the input is a single n-bit number below 2^n − 1, and the output is this number without leading zeros.
    """

    title = "the sum of two numbers in binary, least significant bit first"
    chomsky_level = "C"
    num_input_symbols = 3
    num_output_symbols = 3
    has_terminator = True

    def get_output_length(self, length: int) -> int:
        return length + 1

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        if length > 2:
            inputs, first, second = sample_number_pairs(generator, count, length)
            return inputs, terminate_bits(propagate_carries(first + second), length + 1)
        numbers = generator.integers(2**length - 1, size=count)
        outputs = np.array([[0, TERMINATOR_SYMBOL, 0], [1, TERMINATOR_SYMBOL, 0], [0, 1, TERMINATOR_SYMBOL]])
        return numbers[:, None] >> np.arange(length) & 1, outputs[numbers, : length + 1]
