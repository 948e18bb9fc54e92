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
from .shape import DrawnPositions, Span

ALL_SEQUENCES = slice(None)

Draw = Callable[[int], DrawnPositions | None]
"""The positions of a sequence of a length, where they are drawn."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive places of some sequences of a batch."""

    span: Span
    sequences: Tensor | slice = field(default_factory=lambda: ALL_SEQUENCES)
    """Which ones: int64 indices, or all."""
    first: int = 0
    """The column of the tokens at hand where it begins."""
    padding: int = 0
    """Columns before place 0, in all tokens so far."""
    key_mask: Tensor | None = None
    """Bool [sequences, places so far], False for keys that must not be seen."""

    def columns(self, x: Tensor, dim: int) -> Tensor:
        """What x has of the stretch's tokens along `dim`, of its sequences along the first dimension."""
        return x[self.sequences].narrow(dim, self.first, self.span.length)

    def places(self, x: Tensor, dim: int) -> Tensor:
        """What x, which holds all tokens so far along `dim`, has of the places from 0 to the stretch's end."""
        return x[self.sequences].narrow(dim, self.padding, self.span.stop)


def nothing_drawn(length: int) -> None:
    """Positions are the places themselves."""


def stretches(
    length: int, mask: Tensor | None = None, past: int = 0, draw: Draw = nothing_drawn
) -> tuple[Stretch, ...]:
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
    whole = past + length
    if mask is None:
        return (Stretch(Span(past, length, draw(whole))),)
    return tuple(_padded(length, mask, past, draw))


def one_after_another(spans: Sequence[Span]) -> tuple[Stretch, ...]:
    """Stretches of all sequences that the tokens at hand consist of."""
    firsts = accumulate((span.length for span in spans), initial=0)
    return tuple(Stretch(span, first=first) for span, first in zip(spans, firsts, strict=False))


def ending(parts: Sequence[Stretch], length: int, last: int) -> tuple[Stretch, ...]:
    """What the stretches have of the last n of `length` tokens, as if those alone were at hand."""
    before = max(length - last, 0)
    kept = []
    for part in parts:
        cut = max(before - part.first, 0)
        if cut < part.span.length:
            span = replace(part.span, start=part.span.start + cut, length=part.span.length - cut)
            kept.append(replace(part, span=span, first=part.first + cut - before))
    return tuple(kept)


def _padded(length: int, mask: Tensor, past: int, draw: Draw) -> Iterator[Stretch]:
    whole = past + length
    before = (mask.cumsum(dim=1) == 0).sum(dim=1)
    # No token looks at padding that comes after it, so that may stay; but it must not count where positions are drawn.
    after = (mask.flip(1).cumsum(dim=1) == 0).sum(dim=1) if draw is not nothing_drawn else torch.zeros_like(before)
    for padding, behind in torch.stack([before, after], dim=1).unique(dim=0).tolist():
        first, end = max(padding - past, 0), length - behind
        if first >= end:
            continue
        among = ((before == padding) & (after == behind)).nonzero()[:, 0]
        sequences = ALL_SEQUENCES if len(among) == len(mask) else among
        seen = mask[sequences, padding : whole - behind]
        ends_once = bool((seen[:, 1:] <= seen[:, :-1]).all())
        span = Span(max(past - padding, 0), end - first, draw(whole - padding - behind))
        yield Stretch(span, sequences, first, padding, None if ends_once else seen)


def embedded(hidden: Tensor, encoding: Encoding, parts: Sequence[Stretch]) -> Tensor:
    """Token embeddings [B, T, D] with what the encoding adds to them. Raises ValueError past its last position."""
    vectors = [encoding.embed(part.span, hidden) for part in parts]
    added = [vector[None] for vector in vectors if vector is not None]
    return hidden + _joined(added, parts, hidden, dim=1) if added else hidden


def rotated(x: Tensor, encoding: Encoding, parts: Sequence[Stretch]) -> Tensor:
    """Queries or keys [B, H, T, d] turned by their positions."""
    return _joined([encoding.rotate(part.columns(x, 2), part.span) for part in parts], parts, x, dim=2)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[Stretch],
    attend: Callable[[Tensor, Tensor, Tensor, Stretch], Tensor],
) -> Tensor:
    """Attention output [B, h, T, d] of the tokens at hand, zero where there is padding.

    Args:
        q: of the tokens at hand, [B, H, T, d].
        k, v: of all tokens so far, [B, H or h, past + T, d].
        attend: from queries, keys and values of a stretch, the keys beginning at place 0.
    """
    outputs = [attend(part.columns(q, 2), part.places(k, 2), part.places(v, 2), part) for part in parts]
    return _joined(outputs, parts, q, dim=2)


def _joined(outputs: Sequence[Tensor], parts: Sequence[Stretch], like: Tensor, dim: int) -> Tensor:
    """The outputs of all stretches in the places of their tokens along `dim`; zero where there are none."""
    of_all = all(isinstance(part.sequences, slice) for part in parts)
    if of_all and sum(part.span.length for part in parts) == like.shape[dim]:
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=dim)
    rest = list(outputs[0].shape) if outputs else list(like.shape)
    rest[0], rest[dim] = like.shape[0], like.shape[dim]
    whole = (outputs[0] if outputs else like).new_zeros(rest)
    for output, part in zip(outputs, parts, strict=True):
        index: list[Tensor | slice] = [slice(None)] * output.dim()
        index[0], index[dim] = part.sequences, slice(part.first, part.first + part.span.length)
        whole[tuple(index)] = output.to(whole.dtype)
    return whole
