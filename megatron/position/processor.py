"""The interface of a score processor: a map of all heads' scores and biases to logits, and of what the softmax makes
of these to attention weights.

What a row depends on beside itself is declared, so that whoever divides rows (blocks, ranks, steps of decoding) knows
what to bring along: neighbouring columns (`left_context`), some rows above (`rows_above`), or a sum over all rows above
for each key (`row_terms`).
"""

from typing import NamedTuple

from torch import Tensor

from megatron.position.base import PositionModule
from megatron.position.facts import AttentionDims
from megatron.position.numerics import toeplitz
from megatron.position.token_range import ALL_HEADS, TokenRange


class BiasContribution(NamedTuple):
    """A Toeplitz bias's own part of a processor's first layer of W channels, for key columns from index 0."""

    table: Tensor
    """float32 [W, p + N] at the distances n = −p … N − 1, p the processor's `left_context`."""
    edge: Tensor
    """float32 [W, N, p]: the first columns of rows 0 … N − 1, which see the left edge and are no function of n."""

    def for_rows(self, query: TokenRange, num_columns: int) -> Tensor:
        """[W, R, num_columns + p], W innermost, for query rows and keys 0 … num_columns − 1, and p after them."""
        left_context = self.edge.shape[-1]
        # Entry n of the table stands at n + p, so the rows are read as if they were that much further on.
        shifted = TokenRange(query.start + left_context, query.length)
        edge = self.edge[:, query.start : query.stop]
        return toeplitz(self.table, shifted, TokenRange(0, num_columns + left_context), edge=edge, channels_last=True)


class Processor(PositionModule):
    """Base of all score processors.

    A row depends on its own scores, on those of `rows_above` rows above it, and on what `row_terms` of all rows above
    sum up to; never on rows or columns that follow it. So any block of rows gives the same numbers as the whole.

    B batch, H heads, h requested heads, R rows, C key columns, d head dimension.
    """

    left_context: int = 0
    """Key columns left of a row's first visible one on which the row's logits depend. Where a window hides the columns
    before, a backend may leave them out, except for the nearest of this number."""

    rows_above: int = 0
    """Query rows above a row whose scores its attention weights depend on. They are given with the rows of a block,
    and what comes of them is dropped; where fewer are given, the row is one of its sequence's first."""

    summed_heads: slice = ALL_HEADS
    """The heads whose scores `row_terms` reads."""

    def __init__(self, dims: AttentionDims, *, has_bias: bool) -> None:
        super().__init__(dims)
        self.has_bias = has_bias

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        if cls.overrides("row_terms"):
            return ("sums over rows above",)
        return ("rows independent",) if cls.rows_above == 0 else ("reads rows above",)

    @classmethod
    def overrides(cls, function: str) -> bool:
        """Does it define a function that is optional here?"""
        return getattr(cls, function) is not getattr(Processor, function)

    @property
    def reads_rows_above(self) -> bool:
        """Does a row depend on other rows?"""
        return self.rows_above > 0 or self.overrides("row_terms")

    @property
    def takes_first_columns(self) -> bool:
        """Does it process rows that hold several documents (`first_columns`)? Otherwise it is asked document by
        document."""
        return not self.reads_rows_above

    def has_effect(self) -> bool:
        """False while the logits are exactly S + B: a processor that starts so can be given to a trained model."""
        return True

    def bias_contribution(self, table: Tensor) -> BiasContribution | None:
        """What the processor makes of the bias alone before the scores join it: computed once for all rows.

        Args:
            table: the encoding's bias, float32 [H, N]. Every key up to a row's own must be seen.

        Returns:
            None if it makes nothing of the bias alone.
        """
        return None

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        heads: slice = ALL_HEADS,
        bias_contribution: Tensor | None = None,
        first_columns: Tensor | None = None,
    ) -> Tensor:
        """Logits before the softmax.

        Args:
            scores: weighted and contextual scores [B, H, R, C] in the compute type.
            bias: float32 [H, R, C], or [B, H, R, C] where it depends on the sequence (an encoding with a gate), or None
                when the encoding has none.
            visible: bool, broadcastable to [B, 1, R, C]; False where the key is in the future, padding, or of
                another document. Such entries count as zero, like columns outside the triangle.
            heads: the heads whose logits are wanted, h of them; all are read.
            bias_contribution: `BiasContribution.for_rows(…)` of these rows, [W, R, C + left_context], instead
                of working it out from the bias.
            first_columns: int [B, R], the column at which each row's document begins; given to a processor with a left
                context where a row holds several. What is before it is outside of the row's sequence, as columns
                before 0 are.

        Returns:
            float32 [B, h, R, C]; values at entries that are not visible mean nothing.
        """
        raise NotImplementedError

    def row_terms(
        self, scores: Tensor, bias: Tensor | None, visible: Tensor, query: TokenRange, key: TokenRange
    ) -> Tensor:
        """What each row adds to the numbers, one for each key, that all rows below it read.

        They are sums, so blocks of rows hand them on and a cache keeps a number for each token.

        Args:
            scores, bias, visible: as in `forward`, of the `summed_heads` alone.
            query, key: where rows and columns stand.

        Returns:
            float32 [B, R, C], zero where the key is not visible.
        """
        raise NotImplementedError

    def apply_row_sums(self, logits: Tensor, row_sums: Tensor) -> Tensor:
        """The logits [B, h, R, C] of `forward` with what the sums [B, R, C] of `row_terms` over all rows above do to
        them."""
        raise NotImplementedError

    def process_weights(self, weights: Tensor, visible: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        """What the attention weights become after the softmax and before dropout.

        Args:
            weights: float32 [B, H, R, C] of all heads, zero where a key is not visible.
            visible: as in `forward`.
            heads: the heads whose weights are wanted.

        Returns:
            float32 [B, h, R, C].
        """
        raise NotImplementedError

    def process_output(self, output: Tensor) -> Tensor:
        """What each head's output [B, h, R, d] becomes before the heads are joined."""
        raise NotImplementedError

    def flops_per_score(self) -> float:
        """Forward FLOPs per (b, i, j) over all heads."""
        raise NotImplementedError
