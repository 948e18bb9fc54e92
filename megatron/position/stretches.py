"""Which places of their sequences the tokens at hand stand at.

Usually all sequences of a batch stand at the same places. They do not where some are padded on the left, so that all
end together, and where ranks share a sequence, each holding two parts of it. Both are told as stretches: consecutive
places of some of the sequences. Rotation, embedding and attention go stretch by stretch, everything else takes the
batch as it is.

Hiding padding from attention is not enough. A sequence that begins later has other positions (for encodings that know
absolute ones, and for randomized ones), and CDAPE's convolutions see the edge of the sequence, where a hidden key is
not the same as none. In its stretch a padded sequence begins at place 0, so it is read as it would be alone.

B batch, H heads, T tokens at hand, d head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from .encoding import Encoding
from .shape import PositionRange, SampledPositions

ALL_SEQUENCES = slice(None)

SampleFunction = Callable[[int], SampledPositions | None]
"""The positions of a sequence of a length, where they are drawn."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive places of some sequences of a batch."""

    positions: PositionRange
    sequences: Tensor | slice = field(default_factory=lambda: ALL_SEQUENCES)
    """Which ones: int64 indices, or all."""
    first_column: int = 0
    """The column of the tokens at hand where it begins."""
    num_padding: int = 0
    """Columns before place 0, in all tokens so far."""
    key_mask: Tensor | None = None
    """Bool [sequences, places so far], False for keys that must not be seen."""

    def select_tokens(self, x: Tensor, dim: int) -> Tensor:
        """What x has of the stretch's tokens along `dim`, of its sequences along the first dimension."""
        return x[self.sequences].narrow(dim, self.first_column, self.positions.length)

    def select_context(self, x: Tensor, dim: int) -> Tensor:
        """What x, which holds all tokens so far along `dim`, has of the places from 0 to the stretch's end."""
        return x[self.sequences].narrow(dim, self.num_padding, self.positions.stop)


def no_sampling(length: int) -> None:
    """Positions are the places themselves."""


def build_segments(
    length: int, mask: Tensor | None = None, past: int = 0, sample: SampleFunction = no_sampling
) -> tuple[Segment, ...]:
    """The stretches of a batch.

    Args:
        length: T.
        mask: bool [B, past + T], False for padding. Where it is False before a sequence's first token, the sequence
            begins after it; elsewhere it hides the key, whose place stays counted.
        past: tokens that came before those at hand.

    Returns:
        One stretch if no sequence is padded on the left, else one for each amount of padding; where positions are
        drawn, for each amount of padding on either side. Padding on the left is in none.
    """
    total = past + length
    if mask is None:
        return (Segment(PositionRange(past, length, sample(total))),)
    return tuple(_build_padded_segments(length, mask, past, sample))


def concatenate_ranges(ranges: Sequence[PositionRange]) -> tuple[Segment, ...]:
    """Stretches of all sequences that the tokens at hand consist of."""
    first_columns = accumulate((span.length for span in ranges), initial=0)
    return tuple(Segment(span, first_column=first) for span, first in zip(ranges, first_columns, strict=False))


def last_tokens(segments: Sequence[Segment], length: int, num_tokens: int) -> tuple[Segment, ...]:
    """What the stretches have of the last n of `length` tokens, as if those alone were at hand."""
    num_skipped = max(length - num_tokens, 0)
    remaining = []
    for part in segments:
        cut = max(num_skipped - part.first_column, 0)
        if cut < part.positions.length:
            span = replace(part.positions, start=part.positions.start + cut, length=part.positions.length - cut)
            remaining.append(replace(part, positions=span, first_column=part.first_column + cut - num_skipped))
    return tuple(remaining)


def _build_padded_segments(length: int, mask: Tensor, past: int, sample: SampleFunction) -> Iterator[Segment]:
    total = past + length
    left_padding = (mask.cumsum(dim=1) == 0).sum(dim=1)
    # No token looks at padding that comes after it, so that may stay; but it must not count where positions are drawn.
    right_padding = (
        (mask.flip(1).cumsum(dim=1) == 0).sum(dim=1) if sample is not no_sampling else torch.zeros_like(left_padding)
    )
    for num_left, num_right in torch.stack([left_padding, right_padding], dim=1).unique(dim=0).tolist():
        first, end = max(num_left - past, 0), length - num_right
        if first >= end:
            continue
        members = ((left_padding == num_left) & (right_padding == num_right)).nonzero()[:, 0]
        sequences = ALL_SEQUENCES if len(members) == len(mask) else members
        visible = mask[sequences, num_left : total - num_right]
        only_right_padding = bool((visible[:, 1:] <= visible[:, :-1]).all())
        span = PositionRange(max(past - num_left, 0), end - first, sample(total - num_left - num_right))
        yield Segment(span, sequences, first, num_left, None if only_right_padding else visible)


def add_position_embeddings(hidden: Tensor, encoding: Encoding, segments: Sequence[Segment]) -> Tensor:
    """Token embeddings [B, T, D] with what the encoding adds to them. Raises ValueError past its last position."""
    vectors = [encoding.embed(part.positions, hidden) for part in segments]
    embeddings = [vector[None] for vector in vectors if vector is not None]
    return hidden + _scatter_outputs(embeddings, segments, hidden, dim=1) if embeddings else hidden


def rotate_segments(x: Tensor, encoding: Encoding, segments: Sequence[Segment]) -> Tensor:
    """Queries or keys [B, H, T, d] turned by their positions."""
    return _scatter_outputs(
        [encoding.rotate(part.select_tokens(x, 2), part.positions) for part in segments], segments, x, dim=2
    )


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[Segment],
    attend: Callable[[Tensor, Tensor, Tensor, Segment], Tensor],
) -> Tensor:
    """Attention output [B, h, T, d] of the tokens at hand, zero where there is padding.

    Args:
        q: of the tokens at hand, [B, H, T, d].
        k, v: of all tokens so far, [B, H or h, past + T, d].
        attend: from queries, keys and values of a stretch, the keys beginning at place 0.
    """
    outputs = [
        attend(part.select_tokens(q, 2), part.select_context(k, 2), part.select_context(v, 2), part)
        for part in segments
    ]
    return _scatter_outputs(outputs, segments, q, dim=2)


def _scatter_outputs(outputs: Sequence[Tensor], segments: Sequence[Segment], like: Tensor, dim: int) -> Tensor:
    """The outputs of all stretches in the places of their tokens along `dim`; zero where there are none."""
    all_sequences = all(isinstance(part.sequences, slice) for part in segments)
    if all_sequences and sum(part.positions.length for part in segments) == like.shape[dim]:
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=dim)
    shape = list(outputs[0].shape) if outputs else list(like.shape)
    shape[0], shape[dim] = like.shape[0], like.shape[dim]
    result = (outputs[0] if outputs else like).new_zeros(shape)
    for output, part in zip(outputs, segments, strict=True):
        index: list[Tensor | slice] = [slice(None)] * output.dim()
        index[0], index[dim] = part.sequences, slice(part.first_column, part.first_column + part.positions.length)
        result[tuple(index)] = output.to(result.dtype)
    return result
