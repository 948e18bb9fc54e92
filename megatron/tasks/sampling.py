"""Samplers of tasks: distinct numbers, statements among noise, and repetitive strings."""

import numpy as np

from megatron.tasks.task import Array


def sample_distinct(generator: np.random.Generator, count: int, size: int, below: int) -> Array:
    """Sample `size` distinct numbers below `below` in random order, int64 [count, size]."""
    scores = generator.random((count, below))
    indices = np.argpartition(scores, size - 1, axis=1)[:, :size]
    order = np.argsort(np.take_along_axis(scores, indices, axis=1), axis=1)
    return np.take_along_axis(indices, order, axis=1)


def hide_statements(generator: np.random.Generator, statements: Array, length: int, noise_words: int) -> Array:
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


def sample_repetitive_strings(
    generator: np.random.Generator, count: int, length: int, *, letters: int, pieces: int, piece_length: int
) -> Array:
    """Sample strings that consist of repeated pieces.

    Each string has its own distinct, uniform pieces, and is a random sequence of them, cut to its length. The last n ≤
    piece_length letters therefore do not determine the next one.

    Returns:
        int64 [count, length], letters below `letters`.
    """
    shape = (count, pieces, piece_length)
    own = generator.integers(letters, size=shape)
    while (equal := _find_equal_pieces(own)).any():
        own[equal] = generator.integers(letters, size=(int(equal.sum()), *shape[1:]))
    chosen = generator.integers(pieces, size=(count, -(-length // piece_length)))
    return own[np.arange(count)[:, None], chosen].reshape(count, -1)[:, :length]


def _find_equal_pieces(pieces: Array) -> Array:
    """Return a mask of rows with two equal pieces, bool [B], from [B, pieces, letters]."""
    same = (pieces[:, :, None] == pieces[:, None]).all(axis=3)
    return same.sum(axis=(1, 2)) > pieces.shape[1]
