"""Query rows of a forward pass: inputs of a temperature, and the rows above that a processor reads.

Tokens belong to segments (`segments.py`): a rank's chunks of a sequence, padded sequences, separated documents, or
decoding steps. The factor of a row depends on its own position and on the number of keys it sees, in any segment. Rows
above a segment are from the same forward pass, other ranks, or a cache of earlier steps.

B batch, h heads of a rank, T tokens of the forward pass, d head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_following_row_sums
from megatron.attention.segments import ALL_SEQUENCES, Segment
from megatron.position.temperature import Temperature
from megatron.position.token_range import ALL_HEADS


class QueryRows(NamedTuple):
    """Inputs of a temperature for query rows, float32 [B or 1, T] (`Temperature.forward`)."""

    positions: Tensor
    num_keys: Tensor


def describe_query_rows(
    segments: Sequence[Segment], window: int | None, batch: int, length: int, device: torch.device
) -> QueryRows:
    """Return the position and the number of visible keys of each token.

    Args:
        segments: segments of the forward pass.
        window: window of the layer.
        batch, length: B and T.
        device: device of the result.
    """
    if len(segments) == 1 and segments[0].tokens.length == length and _has_all_sequences(segments[0]):
        return QueryRows(*(rows.float() for rows in _describe_segment(segments[0], window, device)))
    # Describe several segments on the CPU and copy the result once, unless they have tensors on the device.
    place = (
        device
        if any(s.key_mask is not None or s.document_starts is not None for s in segments)
        else torch.device("cpu")
    )
    positions, num_keys = torch.zeros(batch, length, device=place), torch.ones(batch, length, device=place)
    for segment in segments:
        rows = segment.sequences.to(place) if isinstance(segment.sequences, Tensor) else segment.sequences
        columns = slice(segment.first_column, segment.first_column + segment.tokens.length)
        for target, values in zip((positions, num_keys), _describe_segment(segment, window, place), strict=True):
            target[rows, columns] = values.float()
    return QueryRows(*(rows.to(device, non_blocking=True) for rows in (positions, num_keys)))


def _has_all_sequences(segment: Segment) -> bool:
    return isinstance(segment.sequences, slice) and segment.sequences == ALL_SEQUENCES


def _describe_segment(segment: Segment, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions and numbers of keys of a segment's tokens: int64 [sequences or 1, tokens]."""
    indices = segment.tokens.indices(device)[None]
    positions = segment.tokens.positions(device)[None]
    if segment.document_starts is not None:  # the index within a document; positions are not randomized here
        indices = positions = indices - segment.document_starts
    num_keys = indices + 1
    if window is not None:
        num_keys = num_keys.clamp_max(window)
    if segment.key_mask is not None:  # a hidden key is not seen, but its index counts
        total = torch.nn.functional.pad(segment.key_mask.cumsum(1), (1, 0))
        stop = indices + 1
        seen = total.gather(1, stop.expand(len(total), -1)) - total.gather(1, (stop - num_keys).expand(len(total), -1))
        num_keys = seen.clamp_min(1)
    return positions, num_keys


def scale_queries(q: Tensor, temperature: Temperature, rows: QueryRows, heads: slice = ALL_HEADS) -> Tensor:
    """Multiply queries [B, h, T, d] by the factors of their heads and rows, which are float32 in every compute type.

    Args:
        q: rotated queries of the heads of this rank.
        temperature: temperature of the layer.
        rows: result of `describe_query_rows`.
        heads: heads of this rank.
    """
    scale = temperature(rows.positions, rows.num_keys)  # [H or 1, B or 1, T]
    if scale.shape[0] > 1:
        scale = scale[heads]
    return (q * scale.transpose(0, 1)[..., None]).to(q.dtype)


@dataclass(frozen=True)
class PrecedingRows:
    """Available queries, and sums over the rows before them."""

    queries: Tensor
    """Queries [B, H, n, d] of the last n of all tokens so far."""
    num_keys: int
    """Number of tokens so far whose keys are available."""
    sums: Tensor | None
    """float32 [B, available keys]: in decoding, a processor's sums over the rows before the queries; None for none."""

    def add_to(self, inputs: AttentionInputs, segment: Segment) -> AttentionInputs:
        """Return the inputs of a segment with the rows above that its processor reads."""
        assert inputs.processor is not None
        count = None if inputs.processor.overrides("row_terms") else inputs.processor.preceding_rows
        sums = None if self.sums is None else segment.select_context(self.sums, 1)
        return replace(
            inputs, preceding_q=segment.select_preceding_rows(self.queries, self.num_keys, count), row_sums=sums
        )

    def add_rows(self, inputs: AttentionInputs, segment: Segment) -> None:
        """Add the contribution of a segment's rows, and of available rows above, to the sums, without gradients."""
        assert self.sums is not None
        first = segment.first_key_column
        columns = slice(first, first + segment.context.length)
        self.sums[segment.sequences, columns] = compute_following_row_sums(inputs).detach()
