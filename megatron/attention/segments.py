"""Segments: where the tokens of a forward pass are in their sequences.

Usually all sequences of a batch cover the same tokens. Exceptions are sequences padded on the left so that all end
together, ranks that share a sequence, each with two chunks of it, and rows with several documents (`documents.py`). All
of these are described by segments: consecutive tokens of some of the sequences.
Rotation, embedding and attention run per segment, and everything else on the whole batch.

Hiding padding from attention is not enough. A sequence that begins later has other positions (for absolute encodings
and randomized positions). CDAPE's convolutions see the edge of the sequence, where a hidden key differs from no key. In
its segment a padded sequence begins at index 0, so it is read as it would be alone.

B batch, H heads, T tokens of the forward pass, d head dimension.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.token_range import ALL_HEADS, SampledPositions, TokenRange

ALL_SEQUENCES = slice(None)

SampleFunction = Callable[[int], SampledPositions | None]
"""Function that returns the positions of a sequence of a given length, or None if positions are not sampled."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of some sequences of a batch."""

    tokens: TokenRange
    sequences: Tensor | slice = field(default_factory=lambda: ALL_SEQUENCES)
    """Sequences of the segment: int64 indices, a slice, or all."""
    first_column: int = 0
    """First column of the segment in the forward pass."""
    first_key_column: int = 0
    """Column of `first_key` in all tokens so far: after padding, or after other documents."""
    key_mask: Tensor | None = None
    """Bool [sequences, tokens so far], False for hidden keys."""
    document_starts: Tensor | None = None
    """int32 [sequences, tokens]: index of the first key of each token's document; None if all are 0."""
    first_key: int = 0
    """Index of the first available key; earlier keys are hidden by a window."""
    document_mask: Any = None
    """Mask that the backend computed from these tokens' `document_starts` before the layers
    (`backend.compute_document_masks`)."""

    @property
    def context(self) -> TokenRange:
        """Token range of the segment and all tokens before it whose keys are available."""
        return TokenRange(self.first_key, self.tokens.stop - self.first_key, self.tokens.sampled)

    def select_tokens(self, x: Tensor, dim: int) -> Tensor:
        """Select the tokens of the segment along `dim`, and its sequences along the first dimension."""
        return _select(x, self.sequences, dim, self.first_column, self.tokens.length)

    def select_context(self, x: Tensor, dim: int) -> Tensor:
        """Select the tokens from `first_key` to the segment's end along `dim` of x, which holds all tokens so far."""
        return _select(x, self.sequences, dim, self.first_key_column, self.context.length)

    def select_preceding_rows(self, q: Tensor, num_keys: int, count: int | None) -> Tensor | None:
        """Select queries of the available rows directly above the segment; None if there are none.

        Args:
            q: [B, H, n, d], queries of the last n of all tokens so far.
            num_keys: number of these tokens whose keys are available.
            count: maximum number of rows; None for all.
        """
        above = self.tokens.start if count is None else min(self.tokens.start, count)
        column = self.first_key_column + self.tokens.start - self.first_key + q.shape[2] - num_keys
        above = min(above, column)
        return _select(q, self.sequences, 2, column - above, above) if above > 0 else None

    def narrow(self, start: int, length: int, first_column: int) -> "Segment":
        """Return the segment of tokens start … start + length − 1, at a column of another forward pass."""
        tokens = replace(self.tokens, start=self.tokens.start + start, length=length)
        document_starts = None if self.document_starts is None else self.document_starts[:, start : start + length]
        return replace(
            self, tokens=tokens, first_column=first_column, document_starts=document_starts, document_mask=None
        )


def _select(x: Tensor, sequences: Tensor | slice, dim: int, start: int, length: int) -> Tensor:
    """Select from x, or return x itself if everything is selected.

    The gradient of a slice zero-fills a whole tensor.
    """
    if isinstance(sequences, Tensor) or sequences != ALL_SEQUENCES:
        x = x[sequences]
    return x if start == 0 and length == x.shape[dim] else x.narrow(dim, start, length)


def skip_sampling(length: int) -> None:
    """Return None: positions are the indices themselves."""


def build_segments(
    length: int,
    mask: Tensor | None = None,
    past: int = 0,
    sample: SampleFunction = skip_sampling,
    capacity: int | None = None,
) -> tuple[Segment, ...]:
    """Build the segments of a batch.

    Args:
        length: T.
        mask: bool [B, past + T], False for padding. If False before a sequence's first token, the sequence begins after
            it. Elsewhere it hides the key, but its index counts.
        past: number of tokens before those of the forward pass.
        sample: sampling function of randomized positions.
        capacity: maximum number of tokens, padding included; None if the sequence does not grow.

    Returns:
        One segment if no sequence is padded on the left, else one for each amount of left padding. If positions are
        sampled, one for each amount of padding on either side. Left padding is in no segment.
    """
    total = past + length
    if mask is None:
        return (Segment(TokenRange(past, length, sample(total), capacity)),)
    return tuple(_build_padded_segments(length, mask, past, sample, capacity))


def concatenate_ranges(ranges: Sequence[TokenRange]) -> tuple[Segment, ...]:
    """Return segments of all sequences, one after another in the columns of the forward pass."""
    first_columns = accumulate((tokens.length for tokens in ranges), initial=0)
    return tuple(Segment(tokens, first_column=first) for tokens, first in zip(ranges, first_columns, strict=False))


def select_last_tokens(segments: Sequence[Segment], length: int, num_tokens: int) -> tuple[Segment, ...]:
    """Slice the segments to the last `num_tokens` of `length` tokens, as if only these were passed to the model."""
    num_skipped = max(length - num_tokens, 0)
    remaining = []
    for segment in segments:
        cut = max(num_skipped - segment.first_column, 0)
        if cut < segment.tokens.length:
            column = segment.first_column + cut - num_skipped
            remaining.append(segment.narrow(cut, segment.tokens.length - cut, column))
    return tuple(remaining)


def drop_keys(segments: Sequence[Segment], count: int) -> tuple[Segment, ...]:
    """Return the segments after the keys of the first `count` of all tokens so far have been dropped."""
    remaining = []
    for segment in segments:
        lost = max(count - segment.first_key_column, 0)
        mask = None if segment.key_mask is None else segment.key_mask[:, lost:]
        column = max(segment.first_key_column - count, 0)
        first_key = segment.first_key + lost
        remaining.append(
            replace(segment, first_key_column=column, key_mask=mask, first_key=first_key, document_mask=None)
        )
    return tuple(remaining)


def select_chunks(
    segments: Sequence[Segment], chunks: Sequence[tuple[int, int]], *, join_adjacent: bool = True
) -> tuple[Segment, ...]:
    """Return the parts of the segments in some columns, given as (first, length) of each chunk.

    The result is as for a forward pass with only those columns.

    Args:
        join_adjacent: join adjacent chunks. Must be False if only some of the ranks that shard parameters (ZeRO-3)
            have adjacent chunks, because all ranks must call the modules of a layer equally often.
    """
    selected: list[Segment] = []
    for segment in segments:
        parts: list[tuple[int, int, int]] = []  # first column, end, first column among the chunks
        place = 0
        for first, length in chunks:
            start = max(first, segment.first_column)
            stop = min(first + length, segment.first_column + segment.tokens.length)
            column = place + start - first
            if start < stop:
                # Earlier tokens fill the columns before it, so only the row needs to be compared.
                if join_adjacent and parts and parts[-1][1] == start:
                    parts[-1] = (parts[-1][0], stop, parts[-1][2])
                else:
                    parts.append((start, stop, column))
            place += length
        for start, stop, column in parts:
            selected.append(segment.narrow(start - segment.first_column, stop - start, column))
    return tuple(selected)


def _build_padded_segments(
    length: int, mask: Tensor, past: int, sample: SampleFunction, capacity: int | None
) -> Iterator[Segment]:
    total = past + length
    left_padding = (mask.cumsum(dim=1) == 0).sum(dim=1)
    # No token sees padding after it, so it may stay, unless positions are sampled.
    right_padding = (mask.flip(1).cumsum(dim=1) == 0).sum(dim=1)
    if sample is skip_sampling:
        right_padding = torch.zeros_like(left_padding)
    for num_left, num_right in torch.stack([left_padding, right_padding], dim=1).unique(dim=0).tolist():
        first, end = max(num_left - past, 0), length - num_right
        if first >= end:
            continue
        members = ((left_padding == num_left) & (right_padding == num_right)).nonzero()[:, 0]
        sequences = ALL_SEQUENCES if len(members) == len(mask) else members
        visible = mask[sequences, num_left : total - num_right]
        only_right_padding = bool((visible[:, 1:] <= visible[:, :-1]).all())
        sampled = sample(total - num_left - num_right)
        reached = None if capacity is None else capacity - num_left
        tokens = TokenRange(max(past - num_left, 0), end - first, sampled, reached)
        yield Segment(tokens, sequences, first, num_left, None if only_right_padding else visible)


def add_position_embeddings(
    hidden: Tensor, encoding: Encoding, segments: Sequence[Segment], restarted: TokenRange | None = None
) -> Tensor:
    """Add the encoding's position embeddings to token embeddings [B, T, D].

    Args:
        restarted: positions that restart with documents, see `documents.restart_positions`.

    Raises ValueError beyond the last position of the encoding.
    """
    if restarted is not None:
        vectors = encoding.embed(restarted, hidden)  # [T · B, D]
        return hidden if vectors is None else hidden + vectors.unflatten(0, (-1, len(hidden))).transpose(0, 1)
    segment_vectors = [encoding.embed(segment.tokens, hidden) for segment in segments]
    embeddings = [vectors[None] for vectors in segment_vectors if vectors is not None]
    return hidden + _scatter_outputs(embeddings, segments, hidden, dim=1) if embeddings else hidden


def rotate_segments(
    q: Tensor,
    k: Tensor,
    encoding: Encoding,
    segments: Sequence[Segment],
    restarted: TokenRange | None = None,
    heads: slice = ALL_HEADS,
) -> tuple[Tensor, Tensor]:
    """Rotate queries [B, h, T, d] and keys [B, g, T, d] by their positions, to [B, h or g, T, e].

    If the encoding rotates both alike, their heads are concatenated and rotated at once.

    Args:
        restarted: positions that restart with documents, see `documents.restart_positions`.
        heads: heads of the encoding that the queries belong to.

    Raises OptionError if the encoding does not support so many tokens.
    """
    if not type(encoding).overrides_hook("rotate"):
        return q, k
    if encoding.rotates_alike:
        rotated = _rotate_heads([q, k], encoding.rotate, segments, restarted)
        q, k = rotated.split([q.shape[1], k.shape[1]], dim=1)
        return q, k
    key_heads = slice(heads.start, heads.stop, q.shape[1] // k.shape[1])
    return (
        _rotate_heads([q], partial(encoding.rotate, heads=heads), segments, restarted),
        _rotate_heads([k], partial(encoding.rotate_keys, heads=key_heads), segments, restarted),
    )


def _rotate_heads(
    parts: Sequence[Tensor],
    rotate: Callable[[Tensor, TokenRange], Tensor],
    segments: Sequence[Segment],
    restarted: TokenRange | None,
) -> Tensor:
    """Rotate the concatenated heads of all parts."""
    if restarted is not None:
        # Treat all tokens as one sequence, [heads, T · B, d]: the memory layout of activations is [T, B, …].
        batch, _, length, _ = parts[0].shape
        one_row = _concatenate([x.permute(1, 2, 0, 3).flatten(1, 2) for x in parts], 0)
        return rotate(one_row[None], restarted)[0].unflatten(1, (length, batch)).permute(2, 0, 1, 3)
    x = _concatenate(parts, 1)
    rotated = [
        rotate(part, segment.tokens) for part, segment in zip(_split_segments(x, segments, 2), segments, strict=True)
    ]
    return _scatter_outputs(rotated, segments, x, dim=2)


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[Segment],
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, Segment], Tensor],
    gates: Tensor | None = None,
) -> Tensor:
    """Compute the attention output [B, h, T, d] of the forward pass's tokens, zero for padding.

    Args:
        q: queries of the forward pass's tokens, [B, H, T, d].
        k, v: keys and values of all tokens so far, [B, H or h, past + T, d].
        segments: segments of the forward pass.
        attend: function of queries, keys, values and gates of a segment; the keys begin at index 0.
        gates: gates of all tokens so far, [B, H or h, past + T]; None if the encoding has none.
    """
    rows = _split_segments(q, segments, 2)
    keys, values = (_split_contexts(x, segments, 2) for x in (k, v))
    own_gates = [None] * len(segments) if gates is None else _split_contexts(gates, segments, 2)
    outputs = [attend(*parts) for parts in zip(rows, keys, values, own_gates, segments, strict=True)]
    return _scatter_outputs(outputs, segments, q, dim=2)


def has_no_hidden_keys(segments: Sequence[Segment]) -> bool:
    """Return True if there is no padding and no hidden key."""
    return all(isinstance(segment.sequences, slice) and segment.key_mask is None for segment in segments)


def _group_by_rows(segments: Sequence[Segment], batch: int, length: int) -> dict[tuple[int, int], list[int]] | None:
    """Group the indices of segments by rows (first, last + 1) of a batch.

    Returns None unless the groups cover all rows in order, and the segments of each group cover all columns in order.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, segment in enumerate(segments):
        if isinstance(segment.sequences, Tensor):
            return None
        first, last, _ = segment.sequences.indices(batch)
        groups.setdefault((first, last), []).append(number)
    rows = [0, *(end for _, end in groups)]
    if rows[-1] != batch or [first for first, _ in groups] != rows[:-1]:
        return None
    for numbers in groups.values():
        lengths = [segments[number].tokens.length for number in numbers]
        if [segments[number].first_column for number in numbers] != [0, *accumulate(lengths)][:-1]:
            return None
        if sum(lengths) != length:
            return None
    return groups


def _concatenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _split_rows(x: Tensor, rows: Collection[tuple[int, int]]) -> Sequence[Tensor]:
    """Split x into groups of rows, with one gradient for all, unlike slices."""
    return [x] if len(rows) == 1 else x.split([last - first for first, last in rows])


def _split_segments(x: Tensor, segments: Sequence[Segment], dim: int) -> Sequence[Tensor]:
    """Select the tokens of each segment along `dim`."""
    groups = _group_by_rows(segments, x.shape[0], x.shape[dim]) if len(segments) > 1 else None
    if groups is None:
        return [segment.select_tokens(x, dim) for segment in segments]
    parts: list[Tensor] = []
    for rows, numbers in zip(_split_rows(x, groups.keys()), groups.values(), strict=True):
        parts += rows.split([segments[number].tokens.length for number in numbers], dim)
    order = [number for numbers in groups.values() for number in numbers]
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]


def _find_rows(segment: Segment, num_sequences: int) -> tuple[int, int]:
    """Return the first of a segment's consecutive sequences, and the index after its last."""
    assert isinstance(segment.sequences, slice)
    start, stop, _ = segment.sequences.indices(num_sequences)
    return start, stop


def _split_contexts(x: Tensor, segments: Sequence[Segment], dim: int) -> Sequence[Tensor]:
    """Select each segment's sequence from index 0 to its end along `dim` of x, which holds all tokens so far."""
    starts_elsewhere = any(segment.first_key_column for segment in segments)
    if not starts_elsewhere or any(isinstance(segment.sequences, Tensor) for segment in segments):
        return [segment.select_context(x, dim) for segment in segments]
    # Split off each document once, so that its gradients are concatenated once and not summed.
    ends: dict[tuple[int, int], dict[int, int]] = {}
    for segment in segments:
        documents, start = ends.setdefault(_find_rows(segment, x.shape[0]), {}), segment.first_key_column
        documents[start] = max(documents.get(start, 0), start + segment.context.length)
    pieces: dict[tuple[int, int], Tensor] = {}
    for rows, part in zip(ends, _split_rows(x, ends.keys()), strict=True):
        edges = sorted({0, x.shape[dim], *ends[rows], *ends[rows].values()})
        sizes = [stop - start for start, stop in pairwise(edges)]
        for start, piece in zip(edges, part.split(sizes, dim), strict=False):
            pieces[rows[0], start] = piece
    contexts = []
    for segment in segments:
        first_row, _ = _find_rows(segment, x.shape[0])
        piece, length = pieces[first_row, segment.first_key_column], segment.context.length
        contexts.append(piece if length == piece.shape[dim] else piece.narrow(dim, 0, length))
    return contexts


def _scatter_outputs(outputs: Sequence[Tensor], segments: Sequence[Segment], like: Tensor, dim: int) -> Tensor:
    """Place the outputs of all segments at the columns of their tokens along `dim`; zero elsewhere."""
    groups = _group_by_rows(segments, like.shape[0], like.shape[dim])
    if groups is not None:
        rows = [_concatenate([outputs[number] for number in numbers], dim) for numbers in groups.values()]
        return _concatenate(rows, 0)
    shape = list(outputs[0].shape) if outputs else list(like.shape)
    shape[0], shape[dim] = like.shape[0], like.shape[dim]
    result = (outputs[0] if outputs else like).new_zeros(shape)
    for output, segment in zip(outputs, segments, strict=True):
        index: list[Tensor | slice] = [slice(None)] * output.dim()
        columns = slice(segment.first_column, segment.first_column + segment.tokens.length)
        index[0], index[dim] = segment.sequences, columns
        result[tuple(index)] = output.to(result.dtype)
    return result
