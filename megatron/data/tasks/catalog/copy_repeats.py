"""Copying of repetitive strings."""

from typing import Self

import numpy as np
from pydantic import model_validator

from megatron.data.tasks.task import Array, StringTask, TaskBatch
from megatron.options.section import config_field


class CopyRepeats(StringTask):
    """`$ string | string .`: n letters in repeated pieces; the answer is the same letters and a stop token.

    A string of distinct letters can be copied by looking up the previous letter (induction), at any distance and
    without positions. In a string of `pieces` different pieces in random order, the same letters have several
    continuations, and only the position determines which. A trivial baseline shows the accuracy of a lookup of as many
    letters as a piece has.
    """

    title = "n letters in repeated pieces, copied, and a stop token"
    paper = "Zhou et al. (2023), What Algorithms can Transformers Learn? A Study in Length Generalization"
    note = "Zhou et al. repeat single letters of a small alphabet; here pieces of several letters are repeated."

    pieces: int = config_field(4, "number of different pieces per string", ge=1, le=10**4)
    piece_length: int = config_field(3, "number of letters per piece", ge=1, le=10**4)

    @model_validator(mode="after")
    def _check_pieces(self) -> Self:
        if self.letters**self.piece_length < 2 * self.pieces:
            possible = self.letters**self.piece_length
            raise ValueError(f"{self.pieces} pieces are more than half of the {possible} possible pieces")
        return self

    def compute_answer(self, string: Array) -> Array:
        """Return the answers [B, n] to strings [B, n]."""
        return string

    def get_sequence_length(self, length: int) -> int:
        return 2 * length + 2

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        string = sample_repetitive_strings(
            generator, count, length, letters=self.letters, pieces=self.pieces, piece_length=self.piece_length
        )
        return self.build_string_batch(string, self.compute_answer(string))

    def compute_baseline_predictions(self, batch: TaskBatch) -> dict[str, Array]:
        length = batch.tokens.shape[1] // 2 - 1
        source, written = self.compute_answer(batch.tokens[:, 1 : length + 1]), batch.tokens[:, length + 1 :]
        answers = np.full(batch.tokens.shape, self.stop_token)
        answers[:, length + 1] = source[:, 0]
        for place in range(1, length):
            known = min(place, self.piece_length)
            windows = np.lib.stride_tricks.sliding_window_view(source[:, :-1], known, axis=1)
            found = (windows == written[:, None, place - known + 1 : place + 1]).all(axis=2)
            answers[:, length + 1 + place] = np.take_along_axis(source, found.argmax(axis=1)[:, None] + known, 1)[:, 0]
        return {f"what first follows the last {self.piece_length} letters": answers}


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
