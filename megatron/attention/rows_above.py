"""Rows above a segment that a processor reads: from the same forward pass, other ranks, or a cache of earlier steps.

B batch, H heads, d head dimension.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_following_row_sums
from megatron.attention.segments import Segment


@dataclass(frozen=True)
class RowsAbove:
    """Available queries, and sums over the rows before them."""

    queries: Tensor
    """Queries [B, H, n, d] of the last n of all tokens so far."""
    num_keys: int
    """Number of tokens so far whose keys are available."""
    sums: Tensor | None
    """float32 [B, available keys]: in decoding, a processor's sums over the rows before the queries; None for none."""

    def join(self, inputs: AttentionInputs, segment: Segment) -> AttentionInputs:
        """Return the inputs of a segment with the rows above that its processor reads."""
        assert inputs.processor is not None
        count = None if inputs.processor.overrides("row_terms") else inputs.processor.rows_above
        sums = None if self.sums is None else segment.select_context(self.sums, 1)
        return replace(inputs, q_above=segment.select_rows_above(self.queries, self.num_keys, count), row_sums=sums)

    def add_rows(self, inputs: AttentionInputs, segment: Segment) -> None:
        """Add the contribution of a segment's rows, and of available rows above, to the sums, without gradients."""
        assert self.sums is not None
        first = segment.first_key_column
        columns = slice(first, first + segment.context.length)
        self.sums[segment.sequences, columns] = compute_following_row_sums(inputs).detach()
