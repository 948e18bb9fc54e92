"""Binary multiplication: the product of two numbers, bit by bit."""

import numpy as np

from megatron.data.tasks.sampling import propagate_carries, sample_number_pairs, terminate_bits
from megatron.data.tasks.task import TERMINATOR_SYMBOL, Array, TransductionTask


class BinaryMultiplication(TransductionTask):
    """Two binary numbers separated by a 2, lowest bit first; the answer is their product, terminator, and zeros.

    For n ≤ 2 the input is a single number below 2^n − 1, and the output does not depend on it.
    """

    title = "the product of two numbers in binary, least significant bit first"
    chomsky_level = "C"
    num_input_symbols = 3
    num_output_symbols = 3
    has_terminator = True

    def get_output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        if length > 2:
            inputs, first, second = sample_number_pairs(generator, count, length)
            # Convolution before carries: integers below n, which the FFT computes with an error of less than ½.
            first, second = (np.fft.rfft(number, 2 * length) for number in (first, second))
            sums = np.rint(np.fft.irfft(first * second, 2 * length)[:, :length]).astype(np.int64)
            return inputs, terminate_bits(propagate_carries(sums), length)
        numbers = generator.integers(2**length - 1, size=(count, 1))
        outputs = np.array([0, TERMINATOR_SYMBOL][-length:])
        return numbers >> np.arange(length) & 1, np.tile(outputs, (count, 1))
