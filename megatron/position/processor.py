"""Interface of score processors, which map the scores and biases of all heads to logits, and may change the weights.

A processor declares the inputs of a row besides its own scores, so that code that splits rows (into blocks, ranks or
decoding steps) can provide them: neighboring columns (`left_context`), some rows above (`preceding_rows`), or a sum
over all rows above for each key (`row_terms`).
"""

from typing import NamedTuple

from torch import Tensor

from megatron.position.base import PositionModule
from megatron.position.facts import AttentionDims
from megatron.position.numerics import toeplitz
from megatron.position.token_range import ALL_HEADS, TokenRange


class BiasContribution(NamedTuple):
    """Contribution of a Toeplitz bias to the first layer of a processor with W channels, from key column 0 on."""

    table: Tensor
    """float32 [W, p + N] at distances n = −p … N − 1; p is the `left_context` of the processor."""
    edge: Tensor
    """float32 [W, N, p]: the first columns of rows 0 … N − 1, which depend on the left edge and not only on n."""

    def select_rows(self, query: TokenRange, num_columns: int) -> Tensor:
        """Return the contribution to query rows and keys 0 … num_columns + p − 1, [W, R, keys], W innermost."""
        left_context = self.edge.shape[-1]
        # Entry n of the table has index n + p, so the rows are shifted by p.
        shifted = TokenRange(query.start + left_context, query.length)
        edge = self.edge[:, query.start : query.stop]
        return toeplitz(self.table, shifted, TokenRange(0, num_columns + left_context), edge=edge, channels_last=True)


class Processor(PositionModule):
    """Base class of all score processors.

    A row depends on its own scores, on those of `preceding_rows` rows above it, and on the sum of `row_terms` over all
    rows above. It never depends on later rows or columns, so row blocks give the same result as the full score matrix.

    B batch, H heads, h requested heads, R rows, C key columns, d head dimension.
    """

    left_context: int = 0
    """Number of key columns left of a row's first visible one that its logits depend on.

    If a window hides the preceding columns, a backend may omit all but this number of the nearest columns.
    """

    preceding_rows: int = 0
    """Number of query rows above a row whose scores its attention weights depend on.

    These rows are passed together with a block, and their results are dropped. Fewer are passed only at the start of a
    sequence.
    """

    summed_heads: slice = ALL_HEADS
    """Heads whose scores `row_terms` reads."""

    def __init__(self, dims: AttentionDims, *, has_bias: bool) -> None:
        super().__init__(dims)
        self.has_bias = has_bias

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        if cls.overrides("row_terms"):
            return ("sums over rows above",)
        return ("rows independent",) if cls.preceding_rows == 0 else ("reads rows above",)

    @classmethod
    def overrides(cls, function: str) -> bool:
        """Return True if the class defines an optional function."""
        return getattr(cls, function) is not getattr(Processor, function)

    @property
    def reads_preceding_rows(self) -> bool:
        """True if a row depends on other rows."""
        return self.preceding_rows > 0 or self.overrides("row_terms")

    @property
    def supports_packed_documents(self) -> bool:
        """True if the processor supports rows with several documents (`first_columns`).

        Otherwise it runs document by document.
        """
        return not self.reads_preceding_rows

    def has_effect(self) -> bool:
        """Return False if the logits are exactly S + B, so that the processor can be added to a trained model."""
        return True

    def bias_contribution(self, table: Tensor) -> BiasContribution | None:
        """Compute the contribution of the bias alone, once for all rows, before the scores are added.

        Args:
            table: the encoding's bias, float32 [H, N]. Every key up to the row's own must be visible.

        Returns:
            None if the processor cannot compute a contribution of the bias alone.
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
        """Compute the logits.

        Args:
            scores: weighted and contextual scores [B, H, R, C] in the compute type.
            bias: float32 [H, R, C], or [B, H, R, C] if it depends on the sequence (an encoding with a gate); None if
                the encoding has no bias.
            visible: bool, broadcastable to [B, 1, R, C]; False if the key is in the future, padding, or in another
                document. Such entries count as zero, like columns outside the triangle.
            heads: the h heads of the result; all heads are read.
            bias_contribution: `BiasContribution.select_rows(…)` of these rows, [W, R, C + left_context], precomputed
                from the bias.
            first_columns: int [B, R], the column at which each row's document begins. Passed to a processor with a left
                context if a row has several documents. Columns before it are outside the row's sequence, as columns
                before 0 are.

        Returns:
            Logits, float32 [B, h, R, C]; entries that are not visible are undefined.
        """
        raise NotImplementedError

    def row_terms(
        self, scores: Tensor, bias: Tensor | None, visible: Tensor, query: TokenRange, key: TokenRange
    ) -> Tensor:
        """Compute what each row adds to the sums, one per key, that all later rows read.

        Because they are sums, row blocks pass them on, and a cache stores one number per token.

        Args:
            scores, bias, visible: as in `forward`, for the `summed_heads` only.
            query, key: token ranges of rows and columns.

        Returns:
            float32 [B, R, C], zero if the key is not visible.
        """
        raise NotImplementedError

    def apply_row_sums(self, logits: Tensor, row_sums: Tensor) -> Tensor:
        """Apply the sums [B, R, C] of `row_terms` over all rows above to the logits [B, h, R, C] of `forward`."""
        raise NotImplementedError

    def process_weights(self, weights: Tensor, visible: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        """Transform the attention weights after the softmax and before dropout.

        Args:
            weights: float32 [B, H, R, C] of all heads, zero if a key is not visible.
            visible: as in `forward`.
            heads: the heads of the result.

        Returns:
            float32 [B, h, R, C].
        """
        raise NotImplementedError

    def process_output(self, output: Tensor) -> Tensor:
        """Transform the output [B, h, R, d] of each head before the heads are concatenated."""
        raise NotImplementedError

    def flops_per_score(self) -> float:
        """Return the forward FLOPs per (b, i, j) over all heads."""
        raise NotImplementedError
