"""Rows of a check's problem that float64 computes too, and the documents that they belong to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.attention.documents import split_documents
from megatron.attention.segments import (
    SampleFunction,
    Segment,
    no_sampling,
    select_chunks,
)
from megatron.position.token_range import TokenRange

ROWS_PER_RANGE = 64
"""Number of consecutive rows that are compared, if not all are: first, last and middle rows of a segment."""


@dataclass(frozen=True)
class RowRange:
    """Compared rows start … stop − 1 of a segment."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True)
class CheckedDocuments:
    """Documents that do not attend to each other."""

    starts: Tensor
    """int64 [B, T] on the CPU: the column at which the document of each token of the whole rows begins."""
    masked: bool
    """True if attention is computed for whole rows (`backend.can_mask_documents`), not for each document."""
    sample: SampleFunction = no_sampling
    """Sampling function of randomized positions."""

    def select_last(self, num_rows: int) -> "CheckedDocuments":
        """Return the documents of the last sequences."""
        return replace(self, starts=self.starts[-num_rows:])

    def split_rows(self, start: int, length: int) -> tuple[Segment, ...]:
        """Return the segments of rows start … start + length − 1 of all sequences, one per document."""
        segments = split_documents(self.starts, sample=self.sample)
        return select_chunks(segments, [(start, length)], join_neighbours=False)

    def find_borders(self, tokens: TokenRange) -> list[int]:
        """Return the rows of a segment, from 0, at which a new document of the last sequence begins."""
        row = self.starts[-1, tokens.start : tokens.stop]
        return ((row[1:] != row[:-1]).nonzero()[:, 0] + 1).tolist()


def count_documents(starts: Tensor) -> list[int]:
    """Return the number of documents of each sequence."""
    return (starts == torch.arange(starts.shape[1])).sum(1).tolist()


def count_pairs(tokens: TokenRange, window: int | None) -> int:
    if window is None or window >= tokens.stop:
        return tokens.length * (tokens.start + tokens.stop + 1) // 2
    return tokens.length * window


def choose_slabs(
    segments: tuple[TokenRange, ...], rows_per_segment: int, borders: Sequence[Sequence[int]]
) -> Iterator[RowRange]:
    """Choose the compared rows of each segment: all rows if they are few, else first, middle and last ones.

    Middle rows begin in the middle of a tile.

    Args:
        borders: rows of each segment at which documents begin; the middle rows are then on both sides of one of them.
    """
    for index, tokens in enumerate(segments):
        if tokens.length <= rows_per_segment:
            yield RowRange(index, 0, tokens.length)
            continue
        size = max(min(rows_per_segment // 3, ROWS_PER_RANGE), 1)
        border = min(borders[index], key=lambda row: abs(row - tokens.length // 2), default=tokens.length // 2)
        middle = max(border - size // 3, size)
        for start in sorted({0, min(middle, tokens.length - 2 * size), tokens.length - size}):
            yield RowRange(index, start, start + size)
