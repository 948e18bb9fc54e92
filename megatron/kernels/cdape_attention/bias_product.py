"""Terms that `bias_term.py` computes from the bias, and hand-written gradients: one product and a few copies each way.

If operations are small, a step on a GPU takes as long as its host needs to launch them. Autograd through `bias_term.py`
launches several dozen per layer.

L layers, H heads, R query rows, N distances, D processor width, k kernel size, p = k//2, B batch.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.bias_term import saturate
from megatron.kernels.cdape_attention.weights import PackedWeights, WeightShape


class BiasProduct:
    """Bias contributions and their gradients, in float32, for several layers at once.

    One product computes U and all of E. It has one row for each distance from −p to N − 1, with D columns for U and D
    for each column j < p of a map. For the latter, row offset + r + p − j is row r of the map.

    Args:
        shape: shape of the weights.
        rows, offset, window: those of the calls.
        dtype: compute type, which determines saturation.
    """

    def __init__(self, shape: WeightShape, rows: int, offset: int, window: int | None, dtype: torch.dtype) -> None:
        self.shape, self.rows, self.offset, self.count, self.dtype = shape, rows, offset, offset + rows, dtype
        self.window = window
        self.reach = self.count if window is None else min(window, self.count)
        """Number of distances at which Conv1 reads the bias."""

    @property
    def num_contributions(self) -> int:
        """Number of elements of one layer's bias contributions."""
        return (self.shape.padding * (1 + self.rows) + self.count) * self.shape.width

    def build_neighborhoods(self, bias: Tensor | None) -> Tensor | None:
        """Return the values of a bias [L, H, N or more] that Conv1's taps read at each distance, [L, p + N, H·k]."""
        if bias is None:
            return None
        padding, size = self.shape.padding, self.shape.kernel_size
        table = saturate(bias[..., : self.reach], self.dtype)
        padded = F.pad(table, (size - 1, padding + self.count - self.reach))
        return padded.unfold(2, size, 1).transpose(1, 2).flatten(2)

    def compute(self, neighborhoods: Tensor | None, weights: PackedWeights) -> Tensor:
        """Return the bias contributions [L, p + N + R·p, D], like `compute_bias_contributions`.

        Args:
            neighborhoods: from `build_neighborhoods`.
            weights: packed weights of all layers.
        """
        width, padding = self.shape.width, self.shape.padding
        constants = weights.constants[:, None]
        if neighborhoods is None:
            return constants[..., :width].expand(-1, padding + self.count + self.rows * padding, -1).contiguous()
        product = torch.baddbmm(constants, neighborhoods, weights.bias_weight)
        at_edge = [self._select_edge(product, column) for column in range(padding)]
        if padding > 1:
            at_edge = [torch.stack(at_edge, dim=2).flatten(1, 2)]
        return torch.cat([product[..., :width], *at_edge], dim=1) if padding else product

    def allocate_gradient(self, layers: int, device: torch.device) -> Tensor:
        """Allocate the product's gradient, zeros [L, 2p + N, D·(1 + p)], with p extra rows (see `differentiate`)."""
        padding = self.shape.padding
        return torch.zeros(
            layers, 2 * padding + self.count, self.shape.width * (1 + padding), dtype=torch.float32, device=device
        )

    def _select_edge(self, product: Tensor, column: int) -> Tensor:
        """Return the map's rows at a column j < p from the product or its gradient, [(L,) R, D]."""
        first, width = self.offset + self.shape.padding - column, self.shape.width
        return product[..., first : first + self.rows, width * (1 + column) : width * (2 + column)]

    def pair_edge_gradients(self, gradient: Tensor, partial: Tensor, first_row: int) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a total and its partial results for the gradient of E of a chunk's rows.

        A total [rows, D] is part of `gradient`. The partial results [B, rows, D] are those of the sequences. No other
        chunk has these rows.

        Args:
            gradient: one layer's slice of the result of `allocate_gradient`.
            partial: [B, rows, p, D or more].
            first_row: first row of the chunk.
        """
        width, (_, rows, padding, _) = self.shape.width, partial.shape
        stride = gradient.stride(0)
        pairs = []
        for column in range(padding):
            start = gradient.storage_offset() + stride * (self.offset + padding - column + first_row)
            target = gradient.as_strided((rows, width), (stride, 1), start + width * (1 + column))
            pairs.append((target, partial[:, :, column]))
        return pairs

    def add_edge_gradient(self, gradient: Tensor, partial: Tensor, position: int, document_starts: Tensor) -> None:
        """Add the gradient of E from a chunk of packed documents.

        Rows use the values at their offset within the document, so rows of many documents share values. The order of
        the sum is fixed, because `index_put_` sorts on a GPU.

        Args:
            position: position of the chunk's first row.
            document_starts: int32 [B, rows].
        """
        rows = torch.arange(position, position + document_starts.shape[1], device=document_starts.device)
        edge_rows = (rows - document_starts).flatten()
        for column in range(self.shape.padding):
            target = self._select_edge(gradient, column)
            target.index_put_((edge_rows,), partial[:, :, column, : self.shape.width].flatten(0, 1), accumulate=True)

    def differentiate(
        self, gradient: Tensor, bias: Tensor | None, bias_weight: Tensor, dbias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the packed `bias_weight` and of the constant. Add the table's gradient to `dbias`.

        The constant's gradient, float64 [L, D], is summed in float64 (see `repeat_bias`).

        Args:
            gradient: gradient of the product.
            bias: [L, H, N or more], or None.
            bias_weight: bias half of Conv1 from the packed weights of all layers.
            dbias: [L, N, H]; the table's gradient is added to it.
        """
        layers, shape = len(gradient), self.shape
        constant = gradient.view(layers, -1, shape.width).sum(1, dtype=torch.float64)
        neighborhoods = self.build_neighborhoods(bias)  # computed again, which is faster than storing them
        if neighborhoods is None or bias is None:
            return gradient.new_empty(layers, 0), constant
        dweight = neighborhoods.mT @ gradient[:, : neighborhoods.shape[1]]
        dneighborhoods = gradient @ bias_weight.mT
        # Entry a of the table was tap k − 1 − s of row a + s for each s: a diagonal over rows and taps.
        heads, size = shape.heads, shape.kernel_size
        stride = heads * size
        layer = dneighborhoods.stride(0)
        uses = dneighborhoods.as_strided((layers, self.reach, heads, size), (layer, stride, size, stride - 1), size - 1)
        dtable = uses.sum(-1)
        if self.dtype == torch.float16:
            limit = torch.finfo(self.dtype).max
            dtable.masked_fill_(~(bias[..., : self.reach].abs() <= limit).mT, 0.0)
        dbias[:, : self.reach] += dtable
        return dweight, constant


@lru_cache(maxsize=64)
def get_bias_product(shape: WeightShape, rows: int, offset: int, window: int | None, dtype: torch.dtype) -> BiasProduct:
    """Return the product for calls of these sizes, cached for all layers and steps."""
    return BiasProduct(shape, rows, offset, window, dtype)
