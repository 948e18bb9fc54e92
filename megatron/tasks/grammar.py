"""Expressions of digits modulo 5 in brackets, of exactly a given length, with their values.

    length 1: d        2: −d        3: (d)        4: (−d)        5 and more: ( left op right )

d is uniform on 0 … 4, the length of `left` on 1 … length − 4, and op on the operators. All expressions of a batch are
grown together, one level of brackets at a time, and evaluated from the innermost level outwards.
"""

import numpy as np

from megatron.tasks.task import Array

MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE = range(MODULUS, MODULUS + 5)
"""The symbols that follow the digits."""


def sample_expressions(generator: np.random.Generator, count: int, length: int, operators: int) -> tuple[Array, Array]:
    """Draw expressions of `length` symbols.

    Args:
        operators: how many of +, − and × there are to choose from.

    Returns:
        Symbols, int64 [count, length], and values modulo 5, int64 [count].
    """
    symbols = np.zeros((count, length), dtype=np.int64)
    rows, starts, sizes = np.arange(count), np.zeros(count, dtype=np.int64), np.full(count, length)
    levels = []
    while len(rows):
        inner = sizes >= 5
        values = np.zeros(len(rows), dtype=np.int64)
        values[~inner] = _sample_leaves(generator, symbols, rows[~inner], starts[~inner], sizes[~inner])
        rows, starts, sizes = rows[inner], starts[inner], sizes[inner]
        left = generator.integers(1, sizes - 3)
        chosen = generator.integers(operators, size=len(rows))
        symbols[rows, starts], symbols[rows, starts + sizes - 1] = OPEN, CLOSE
        symbols[rows, starts + 1 + left] = PLUS + chosen
        levels.append((values, inner, chosen))
        rows = np.concatenate([rows, rows])
        starts, sizes = np.concatenate([starts + 1, starts + 2 + left]), np.concatenate([left, sizes - 3 - left])
    below = np.zeros(0, dtype=np.int64)
    for values, inner, chosen in reversed(levels):
        one, other = np.split(below, 2)
        values[inner] = np.choose(chosen, [one + other, one - other, one * other]) % MODULUS
        below = values
    return symbols, below


def _sample_leaves(generator: np.random.Generator, symbols: Array, rows: Array, starts: Array, sizes: Array) -> Array:
    """Write the expressions that hold a single digit; returns their values."""
    digits = generator.integers(MODULUS, size=len(rows))
    bracketed, negative = sizes >= 3, sizes % 2 == 0
    symbols[rows[bracketed], starts[bracketed]] = OPEN
    symbols[rows[bracketed], (starts + sizes - 1)[bracketed]] = CLOSE
    symbols[rows[negative], (starts + bracketed)[negative]] = MINUS
    symbols[rows, starts + bracketed + negative] = digits
    return np.where(negative, -digits, digits) % MODULUS
