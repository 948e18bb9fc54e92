"""Samplers of tasks: distinct numbers, statements among noise, bits, and expressions modulo 5."""

import numpy as np

from megatron.data.tasks.task import TERMINATOR_SYMBOL, Array


def sample_distinct(generator: np.random.Generator, count: int, size: int, below: int) -> Array:
    """Sample `size` distinct numbers below `below` in random order, int64 [count, size]."""
    scores = generator.random((count, below))
    indices = np.argpartition(scores, size - 1, axis=1)[:, :size]
    order = np.argsort(np.take_along_axis(scores, indices, axis=1), axis=1)
    return np.take_along_axis(indices, order, axis=1)


def insert_statements(generator: np.random.Generator, statements: Array, length: int, noise_words: int) -> Array:
    """Build a haystack: statements in order, at uniform positions among noise.

    All sets of positions without overlap have the same probability.

    Args:
        statements: int64 [B, statements, tokens of each].
        length: number of tokens in the haystack; at least those of all statements.
        noise_words: noise is uniform on the ids 0 … noise_words − 1.

    Returns:
        int64 [B, length].
    """
    count, number, width = statements.shape
    places = sample_distinct(generator, count, number, length - number * (width - 1))
    starts = np.sort(places, axis=1) + np.arange(number) * (width - 1)
    tokens = generator.integers(noise_words, size=(count, length))
    for column in range(width):
        np.put_along_axis(tokens, starts + column, statements[:, :, column], axis=1)
    return tokens


SEPARATOR = 2
"""Separator between two binary numbers."""

MODULUS = 5
"""Modulus of expressions."""
PLUS, MINUS, TIMES, OPEN, CLOSE = range(MODULUS, MODULUS + 5)
"""Symbols after the digits."""


def sample_bits(generator: np.random.Generator, count: int, length: int) -> Array:
    """Sample uniform bits, int64 [count, length]."""
    return generator.integers(2, size=(count, length))


def sample_positive(generator: np.random.Generator, count: int, lengths: Array, width: int) -> Array:
    """Sample uniform numbers 1 … 2^length − 1 as bits, int64 [count, width], with zeros beyond each length."""
    mask = np.arange(width) < lengths[:, None]
    bits = sample_bits(generator, count, width) * mask
    while (zero := ~bits.any(axis=1)).any():
        bits[zero] = sample_bits(generator, int(zero.sum()), width) * mask[zero]
    return bits


def sample_number_pairs(generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array, Array]:
    """Sample two numbers of at least one bit each, least significant bit first, with a separator.

    The total is `length` ≥ 3 symbols.

    The length of the first number is uniform on 1 … length − 2. Each value is uniform on 1 … 2^length − 1.

    Returns:
        Symbols, int64 [count, length]; and the bits of both numbers, int64 [count, length], with zeros beyond their
        lengths.
    """
    first_lengths = generator.integers(1, length - 1, size=count)
    first, second = (
        sample_positive(generator, count, lengths, length) for lengths in (first_lengths, length - 1 - first_lengths)
    )
    bit_of_second = np.arange(length) - first_lengths[:, None] - 1
    symbols = np.where(bit_of_second < 0, first, np.take_along_axis(second, np.maximum(bit_of_second, 0), axis=1))
    symbols[np.arange(count), first_lengths] = SEPARATOR
    return symbols, first, second


def propagate_carries(sums: Array) -> Array:
    """Compute the bits of the numbers Σ sums[:, i]·2^i, which must fit in as many bits as there are columns."""
    bits = np.zeros_like(sums)
    carry = np.zeros(len(sums), dtype=sums.dtype)
    for column in range(sums.shape[1]):
        carry = carry + sums[:, column]
        bits[:, column] = carry % 2
        carry = carry // 2
    return bits


def terminate_bits(bits: Array, width: int) -> Array:
    """Write positive numbers without leading zeros (highest bits), followed by the terminator and zeros.

    Args:
        bits: int64 [count, any], least significant bit first.

    Returns:
        int64 [count, width].
    """
    count, columns = bits.shape
    result = np.zeros((count, width), dtype=np.int64)
    copied = min(columns, width)
    result[:, :copied] = bits[:, :copied]
    lengths = columns - bits[:, ::-1].argmax(axis=1)
    result[np.arange(count), lengths] = TERMINATOR_SYMBOL
    return result


def sample_expressions(generator: np.random.Generator, count: int, length: int, operators: int) -> tuple[Array, Array]:
    """Sample expressions of `length` symbols.

        length 1: d        2: −d        3: (d)        4: (−d)        5 and more: ( left op right )

    d is uniform on 0 … 4, the length of `left` on 1 … length − 4, and op on the operators. All expressions of a batch
    are expanded together, one bracket level at a time, and evaluated from the innermost level outward.

    Args:
        operators: number of operators to choose from +, −, and ×, in this order.

    Returns:
        Symbols, int64 [count, length], and values modulo 5, int64 [count].
    """
    symbols = np.zeros((count, length), dtype=np.int64)
    rows, starts, sizes = np.arange(count), np.zeros(count, dtype=np.int64), np.full(count, length)
    levels = []
    while len(rows):
        nested = sizes >= 5
        values = np.zeros(len(rows), dtype=np.int64)
        values[~nested] = _sample_leaves(generator, symbols, rows[~nested], starts[~nested], sizes[~nested])
        rows, starts, sizes = rows[nested], starts[nested], sizes[nested]
        left_sizes = generator.integers(1, sizes - 3)
        operator = generator.integers(operators, size=len(rows))
        symbols[rows, starts], symbols[rows, starts + sizes - 1] = OPEN, CLOSE
        symbols[rows, starts + 1 + left_sizes] = PLUS + operator
        levels.append((values, nested, operator))
        rows = np.concatenate([rows, rows])
        starts, sizes = (
            np.concatenate([starts + 1, starts + 2 + left_sizes]),
            np.concatenate([left_sizes, sizes - 3 - left_sizes]),
        )
    inner_values = np.zeros(0, dtype=np.int64)
    for values, nested, operator in reversed(levels):
        left, right = np.split(inner_values, 2)
        values[nested] = np.choose(operator, [left + right, left - right, left * right]) % MODULUS
        inner_values = values
    return symbols, inner_values


def _sample_leaves(generator: np.random.Generator, symbols: Array, rows: Array, starts: Array, sizes: Array) -> Array:
    """Write expressions with a single digit, and return their values."""
    digits = generator.integers(MODULUS, size=len(rows))
    bracketed, negative = sizes >= 3, sizes % 2 == 0
    symbols[rows[bracketed], starts[bracketed]] = OPEN
    symbols[rows[bracketed], (starts + sizes - 1)[bracketed]] = CLOSE
    symbols[rows[negative], (starts + bracketed)[negative]] = MINUS
    symbols[rows, starts + bracketed + negative] = digits
    return np.where(negative, -digits, digits) % MODULUS
