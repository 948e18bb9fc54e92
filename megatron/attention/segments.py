"""Where the tokens of a forward pass stand in their sequences.

Usually all sequences of a batch stand at the same tokens. They do not where some are padded on the left, so that all
end together, and where ranks share a sequence, each holding two chunks of it. Both are described by segments:
consecutive tokens of some of the sequences. Rotation, embedding and attention go segment by segment, everything else
takes the batch as it is.

Hiding padding from attention is not enough. A sequence that begins later has other positions (for encodings that know
absolute ones, and for randomized ones), and CDAPE's convolutions see the edge of the sequence, where a hidden key is
not the same as none. In its segment a padded sequence begins at index 0, so it is read as it would be alone.

B batch, H heads, T tokens of the forward pass, d head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.token_range import SampledPositions, TokenRange

ALL_SEQUENCES = slice(None)

SampleFunction = Callable[[int], SampledPositions | None]
"""The positions of a sequence of a length, where they are sampled."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of some sequences of a batch."""

    tokens: TokenRange
    sequences: Tensor | slice = field(default_factory=lambda: ALL_SEQUENCES)
    """Which ones: int64 indices, or all."""
    first_column: int = 0
    """The column of the forward pass's tokens at which it begins."""
    num_padding: int = 0
    """Columns before index 0, in all tokens so far."""
    key_mask: Tensor | None = None
    """Bool [sequences, tokens so far], False for keys that must not be seen."""

    @property
    def context(self) -> TokenRange:
        """Its tokens and all before them."""
        return TokenRange(0, self.tokens.stop, self.tokens.sampled)

    def select_tokens(self, x: Tensor, dim: int) -> Tensor:
        """What x has of the segment's tokens along `dim`, of its sequences along the first dimension."""
        return _select(x, self.sequences, dim, self.first_column, self.tokens.length)

    def select_context(self, x: Tensor, dim: int) -> Tensor:
        """What x, which holds all tokens so far along `dim`, has of those from index 0 to the segment's end."""
        return _select(x, self.sequences, dim, self.num_padding, self.tokens.stop)


def _select(x: Tensor, sequences: Tensor | slice, dim: int, start: int, length: int) -> Tensor:
    """x itself where that is all of it: the gradient of a slice fills a whole tensor with zeros first."""
    if isinstance(sequences, Tensor):
        x = x[sequences]
    return x if start == 0 and length == x.shape[dim] else x.narrow(dim, start, length)


def no_sampling(length: int) -> None:
    """Positions are the indices themselves."""


def build_segments(
    length: int, mask: Tensor | None = None, past: int = 0, sample: SampleFunction = no_sampling
) -> tuple[Segment, ...]:
    """The segments of a batch.

    Args:
        length: T.
        mask: bool [B, past + T], False for padding. Where it is False before a sequence's first token, the sequence
            begins after it; elsewhere it hides the key, whose index stays counted.
        past: tokens that came before those of the forward pass.
        sample: of randomized positions.

    Returns:
        One segment if no sequence is padded on the left, else one for each amount of padding; where positions are
        sampled, for each amount of padding on either side. Padding on the left is in none.
    """
    total = past + length
    if mask is None:
        return (Segment(TokenRange(past, length, sample(total))),)
    return tuple(_build_padded_segments(length, mask, past, sample))


def concatenate_ranges(ranges: Sequence[TokenRange]) -> tuple[Segment, ...]:
    """Segments of all sequences, one after another in the columns of the forward pass."""
    first_columns = accumulate((tokens.length for tokens in ranges), initial=0)
    return tuple(Segment(tokens, first_column=first) for tokens, first in zip(ranges, first_columns, strict=False))


def select_last_tokens(segments: Sequence[Segment], length: int, num_tokens: int) -> tuple[Segment, ...]:
    """What the segments have of the last n of `length` tokens, as if the forward pass had those alone."""
    num_skipped = max(length - num_tokens, 0)
    remaining = []
    for segment in segments:
        tokens = segment.tokens
        cut = max(num_skipped - segment.first_column, 0)
        if cut < tokens.length:
            rest = replace(tokens, start=tokens.start + cut, length=tokens.length - cut)
            remaining.append(replace(segment, tokens=rest, first_column=segment.first_column + cut - num_skipped))
    return tuple(remaining)


def select_chunks(segments: Sequence[Segment], chunks: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """What the segments have of some columns, (first, number) of each chunk, as if the forward pass had those alone."""
    selected: list[Segment] = []
    place = 0
    for first, length in chunks:
        for segment in segments:
            tokens = segment.tokens
            start = max(first, segment.first_column)
            stop = min(first + length, segment.first_column + tokens.length)
            if start >= stop:
                continue
            part = replace(tokens, start=tokens.start + start - segment.first_column, length=stop - start)
            if selected and selected[-1].tokens.stop == part.start:  # a rank's two chunks may be neighbours
                whole = replace(selected[-1].tokens, length=selected[-1].tokens.length + part.length)
                selected[-1] = replace(selected[-1], tokens=whole)
            else:
                selected.append(replace(segment, tokens=part, first_column=place + start - first))
        place += length
    return tuple(selected)


def _build_padded_segments(length: int, mask: Tensor, past: int, sample: SampleFunction) -> Iterator[Segment]:
    total = past + length
    left_padding = (mask.cumsum(dim=1) == 0).sum(dim=1)
    # No token looks at padding that comes after it, so that may stay; but it must not count where positions are
    # sampled.
    right_padding = (mask.flip(1).cumsum(dim=1) == 0).sum(dim=1)
    if sample is no_sampling:
        right_padding = torch.zeros_like(left_padding)
    for num_left, num_right in torch.stack([left_padding, right_padding], dim=1).unique(dim=0).tolist():
        first, end = max(num_left - past, 0), length - num_right
        if first >= end:
            continue
        members = ((left_padding == num_left) & (right_padding == num_right)).nonzero()[:, 0]
        sequences = ALL_SEQUENCES if len(members) == len(mask) else members
        visible = mask[sequences, num_left : total - num_right]
        only_right_padding = bool((visible[:, 1:] <= visible[:, :-1]).all())
        tokens = TokenRange(max(past - num_left, 0), end - first, sample(total - num_left - num_right))
        yield Segment(tokens, sequences, first, num_left, None if only_right_padding else visible)


def add_position_embeddings(hidden: Tensor, encoding: Encoding, segments: Sequence[Segment]) -> Tensor:
    """Token embeddings [B, T, D] with what the encoding adds to them. Raises ValueError past its last position."""
    vectors = [encoding.embed(segment.tokens, hidden) for segment in segments]
    embeddings = [vector[None] for vector in vectors if vector is not None]
    return hidden + _scatter_outputs(embeddings, segments, hidden, dim=1) if embeddings else hidden


def rotate_segments(q: Tensor, k: Tensor, encoding: Encoding, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Queries [B, H, T, d] and keys [B, g, T, d] turned by their positions: their heads side by side, all at once."""
    if not type(encoding).overrides_hook("rotate"):
        return q, k
    x = torch.cat([q, k], dim=1)
    rotated = [
        encoding.rotate(part, segment.tokens)
        for part, segment in zip(_split_segments(x, segments, 2), segments, strict=True)
    ]
    q, k = _scatter_outputs(rotated, segments, x, dim=2).split([q.shape[1], k.shape[1]], dim=1)
    return q, k


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[Segment],
    attend: Callable[[Tensor, Tensor, Tensor, Segment], Tensor],
) -> Tensor:
    """Attention output [B, h, T, d] of the forward pass's tokens, zero where there is padding.

    Args:
        q: of the forward pass's tokens, [B, H, T, d].
        k, v: of all tokens so far, [B, H or h, past + T, d].
        segments: of the forward pass.
        attend: from queries, keys and values of a segment, the keys beginning at index 0.
    """
    outputs = [
        attend(rows, segment.select_context(k, 2), segment.select_context(v, 2), segment)
        for rows, segment in zip(_split_segments(q, segments, 2), segments, strict=True)
    ]
    return _scatter_outputs(outputs, segments, q, dim=2)


def hide_nothing(segments: Sequence[Segment]) -> bool:
    """Do they have all sequences, and no key that must not be seen?"""
    return all(isinstance(segment.sequences, slice) and segment.key_mask is None for segment in segments)


def _cover_all(segments: Sequence[Segment], length: int) -> bool:
    """Do the segments, one after the other, have all tokens of all sequences?"""
    all_sequences = all(isinstance(segment.sequences, slice) for segment in segments)
    return all_sequences and sum(segment.tokens.length for segment in segments) == length


def _split_segments(x: Tensor, segments: Sequence[Segment], dim: int) -> Sequence[Tensor]:
    """What x has of the tokens of each segment along `dim`."""
    if len(segments) > 1 and _cover_all(segments, x.shape[dim]):
        return x.split([segment.tokens.length for segment in segments], dim)  # one gradient for all, unlike slices
    return [segment.select_tokens(x, dim) for segment in segments]


def _scatter_outputs(outputs: Sequence[Tensor], segments: Sequence[Segment], like: Tensor, dim: int) -> Tensor:
    """The outputs of all segments at the columns of their tokens along `dim`; zero where there are none."""
    if _cover_all(segments, like.shape[dim]):
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=dim)
    shape = list(outputs[0].shape) if outputs else list(like.shape)
    shape[0], shape[dim] = like.shape[0], like.shape[dim]
    result = (outputs[0] if outputs else like).new_zeros(shape)
    for output, segment in zip(outputs, segments, strict=True):
        index: list[Tensor | slice] = [slice(None)] * output.dim()
        columns = slice(segment.first_column, segment.first_column + segment.tokens.length)
        index[0], index[dim] = segment.sequences, columns
        result[tuple(index)] = output.to(result.dtype)
    return result
