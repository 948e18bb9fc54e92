"""The interface of a score processor: a learned map of all heads' scores and biases, one query row at a time."""

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
    """Base of all score processors (DAPE and its kin).

    Rows are independent of each other: a processor may mix heads and key columns of one row, never rows. So any block
    of rows gives the same numbers as the whole, and a row never depends on how many rows or columns follow it.
    """

    left_context: int = 0
    """Key columns left of a row's first visible one on which the row's logits depend. Where a window hides the columns
    before, a backend may leave them out, except for the nearest of this number."""

    def __init__(self, dims: AttentionDims, *, has_bias: bool) -> None:
        super().__init__(dims)
        self.has_bias = has_bias

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        return ("rows independent",)

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

    def flops_per_score(self) -> float:
        """Forward FLOPs per (b, i, j) over all heads."""
        raise NotImplementedError
