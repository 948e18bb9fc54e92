"""Binary multiplication: the product of two numbers, bit by bit."""

import numpy as np

from megatron.tasks.binary import propagate_carries, sample_pairs, terminate_bits
from megatron.tasks.task import Array
from megatron.tasks.transduction import TERMINATOR_SYMBOL, Transduction


class BinaryMultiplication(Transduction):
    """Two numbers with a 2 between them, least significant bit first; their product, then the terminator, then zeros.

    For n ≤ 2 the input is a single number below 2^n − 1, and the output does not depend on it.
    """

    title = "the product of two numbers in binary, least significant bit first"
    level = "C"
    inputs = 3
    outputs = 3
    terminated = True

    def output_length(self, length: int) -> int:
        return length

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        if length > 2:
            given, one, other = sample_pairs(generator, count, length)
            # Their convolution, before carrying: whole numbers below n, which Fourier transforms miss by less than ½.
            one, other = (np.fft.rfft(number, 2 * length) for number in (one, other))
            sums = np.rint(np.fft.irfft(one * other, 2 * length)[:, :length]).astype(np.int64)
            return given, terminate_bits(propagate_carries(sums), length)
        numbers = generator.integers(2**length - 1, size=(count, 1))
        wanted = np.array([0, TERMINATOR_SYMBOL][-length:])
        return numbers >> np.arange(length) & 1, np.tile(wanted, (count, 1))
