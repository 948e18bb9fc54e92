"""Problem of a call, and the chunks of query rows in which it is computed.

B batch, H heads, R query rows, C key columns, N distances, D processor width, k kernel size, p = k//2. A chunk's maps
contain the columns that any of its rows attends to. They are freed with the chunk, so memory is linear in R and C.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.configs import build_processor_constants, choose_processor_tile
from megatron.kernels.cdape_attention.mixer_operands import MAX_TILE_COLUMNS, MixerOperands
from megatron.kernels.cdape_attention.weights import PackedWeights, WeightShape
from megatron.kernels.runtime import Tile

NO_WINDOW_INT32 = 1 << 30
"""Window of calls without one, small enough that the sum with a position fits in 32 bits."""


@dataclass(frozen=True)
class CdapeProblem:
    """Inputs that are the same for all chunks."""

    bias_contributions: Tensor
    """float32 [p + N + R·p, D], from `bias_product.BiasProduct`."""
    bias_table: Tensor
    """Bias added to the logits, float32 [H, N], or [H, 0] without one."""
    weights: PackedWeights
    shape: WeightShape
    rows: int
    offset: int
    window: int
    dtype: torch.dtype
    document_starts: Tensor | None = None
    """int32 [B, R], positions at which the rows' documents begin. E then starts at position 0."""
    sinks: Tensor | None = None
    """Sinks, float32 [H], contiguous."""
    head_map: Tensor | None = None
    """Map of the attention weights (`args.CdapeArgs`), float32 [H, H], contiguous."""
    uses_mixer: bool = False
    """True if both passes use the CUDA kernels (`mixer.py`) for the shapes that they support."""
    operands: MixerOperands | None = None
    """Operands of these kernels for several layers."""
    layer: int = 0
    """Index of the layer in the operands."""

    @property
    def heads(self) -> int:
        return self.shape.heads

    @property
    def padding(self) -> int:
        """Number of columns that the taps reach to each side, p."""
        return self.shape.padding

    @property
    def has_bias(self) -> bool:
        return self.bias_table.shape[1] > 0

    def tile(self, kernel: str, rows: int) -> Tile:
        """Return the tile of a processor kernel for a chunk with this number of rows."""
        return choose_processor_tile(kernel, self.heads, self.shape.width, self.shape.kernel_size, rows, self.dtype)

    def constants(self, kernel: str, tile: Tile) -> dict[str, Any]:
        """Return the constants of a processor kernel."""
        shape = self.shape
        sizes = (shape.heads, shape.width, shape.kernel_size)
        return build_processor_constants(
            kernel, *sizes, self.dtype, tile, has_bias=self.has_bias, is_linear=shape.is_linear
        )


@dataclass(frozen=True)
class Chunk:
    """Rows first … last − 1 of the queries, and the columns that any of them attends to."""

    first: int
    last: int
    left: int
    right: int
    position: int
    """Position of the first row."""
    edge_start: int
    """Index of the left edge's values in the bias contributions."""
    document_starts: Tensor | None = None
    """First keys of the chunk's rows."""

    @cached_property
    def rows(self) -> int:
        return self.last - self.first

    def slice_rows(self, x: Tensor) -> Tensor:
        """Slice the chunk's rows from the third dimension of a tensor [·, ·, all rows, …]."""
        return x if self.rows == x.shape[2] else x[:, :, self.first : self.last]

    def slice_columns(self, x: Tensor) -> Tensor:
        """Slice the chunk's columns from the third dimension of a tensor [·, ·, all columns, …]."""
        is_whole = self.left == 0 and self.right == x.shape[2]
        return x if is_whole else x[:, :, self.left : self.right]

    def slice_row_sums(self, x: Tensor) -> Tensor:
        """Slice the chunk's rows from the last dimension of a tensor […, all rows]."""
        return x if self.rows == x.shape[-1] else x[..., self.first : self.last]

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """R, C, and the positions of the maps' first row and column, which determine visibility in all kernels."""
        return self.rows, self.right - self.left, self.position, self.left

    @property
    def processor_extent(self) -> tuple[int, ...]:
        """Extent for the processor kernels, including the chunk's index into the left edge's values."""
        return (*self.extent, self.edge_start, self.first if self.document_starts is None else 0)


def list_chunks(problem: CdapeProblem, chunk_rows: int) -> Sequence[Chunk]:
    """Return the chunks of a call, from the first rows on."""
    chunks = _list_chunks(problem.rows, problem.offset, problem.window, problem.padding, chunk_rows)
    starts = problem.document_starts
    if starts is None:
        return chunks
    return [replace(chunk, document_starts=starts[:, chunk.first : chunk.last].contiguous()) for chunk in chunks]


@lru_cache(maxsize=256)
def _list_chunks(rows: int, offset: int, window: int, padding: int, chunk_rows: int) -> tuple[Chunk, ...]:
    """Return the chunks of calls of these sizes without documents, cached for all layers and steps."""
    chunks = []
    for first in range(0, rows, chunk_rows):
        last, position = min(first + chunk_rows, rows), offset + first
        # The kernels thus divide a row's columns into the same tiles in all chunks.
        left = max(position - window + 1, 0) // MAX_TILE_COLUMNS * MAX_TILE_COLUMNS
        chunks.append(Chunk(first, last, left, offset + last, position, offset + rows + padding))
    return tuple(chunks)
