"""Two numbers in binary with the least significant bit first, and results that end with a terminator."""

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import TERMINATOR_SYMBOL, sample_positive

SEPARATOR = 2


def sample_pairs(generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array, Array]:
    """Two numbers of at least one bit each, with a separator between them, in `length` ≥ 3 symbols.

    The first one's length is uniform on 1 … length − 2, each value uniform on 1 … 2^length − 1.

    Returns:
        Symbols, int64 [count, length]; the bits of the two, int64 [count, length], zeros beyond their lengths.
    """
    first = generator.integers(1, length - 1, size=count)
    one, other = (sample_positive(generator, count, lengths, length) for lengths in (first, length - 1 - first))
    places = np.arange(length)
    behind = places - first[:, None] - 1
    symbols = np.where(behind < 0, one, np.take_along_axis(other, np.maximum(behind, 0), axis=1))
    symbols[np.arange(count), first] = SEPARATOR
    return symbols, one, other


def propagate_carries(sums: Array) -> Array:
    """Bits of the numbers Σ sums[:, i]·2^i, of which as many as there are columns suffice."""
    bits = np.zeros_like(sums)
    carry = np.zeros(len(sums), dtype=sums.dtype)
    for place in range(sums.shape[1]):
        carry = carry + sums[:, place]
        bits[:, place] = carry % 2
        carry = carry // 2
    return bits


def terminate_bits(bits: Array, width: int) -> Array:
    """Numbers greater than 0 without the zeros above their highest bit, then the terminator, then zeros.

    bits: int64 [count, any]. Returns int64 [count, width].
    """
    count, columns = bits.shape
    result = np.zeros((count, width), dtype=np.int64)
    most = min(columns, width)
    result[:, :most] = bits[:, :most]
    lengths = columns - bits[:, ::-1].argmax(axis=1)
    result[np.arange(count), lengths] = TERMINATOR_SYMBOL
    return result
