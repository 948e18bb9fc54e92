"""Static table of tile sizes by compute capability, type and head dimension, so that all ranks agree.

The tiles of `bwd_dq`, whose kernel sums over diagonals, are square.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from megatron.kernels.head_dim import build_head_dim_constants, pad_for_dot
from megatron.kernels.runtime import INPUT_PRECISION, Tile


@dataclass(frozen=True)
class OpTiles:
    """Tiles of the op's three kernels."""

    fwd: Tile
    bwd_dq: Tile
    bwd_dkdv: Tile


HALF = {
    80: {
        64: OpTiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 1), Tile(32, 128, 8, 2)),
        80: OpTiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 1), Tile(32, 128, 8, 1)),
        96: OpTiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(32, 128, 8, 1)),
        128: OpTiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 2)),
    },
    90: {
        64: OpTiles(Tile(64, 32, 4, 3), Tile(64, 64, 4, 3), Tile(32, 64, 4, 2)),
        80: OpTiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
        96: OpTiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 1), Tile(64, 128, 8, 2)),
        128: OpTiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(32, 128, 8, 2)),
    },
}
"""Tiles for float16 and bfloat16, by architecture and maximum head dimension.

Among the tiles within the spill budget, these need the fewest instructions per score (`tools/bench/instructions.py`),
including spills. Two stages, which prefetch, are used if they add less than 10% and no spills. If four warps can
process a tile of `bwd_dq`, eight need 1.4 to 2 times the instructions, because most of a warp's work does not shrink
with its share of the tile. The remaining spills are mostly around the loop over columns, not inside it. For d = 64 on
sm_90 the tiles are the fastest of ten that were timed on an H200 (docs/results/gpu_tiles.json). With one stage, ptxas
miscompiles `bwd_dq` on sm_90 at d = 80 without a table (`kernels/compile.py`).
"""

SINGLE = {
    64: OpTiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: OpTiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
}
"""Tiles for float32 by maximum head dimension. Its products are exact to float32 (no TF32)."""

INTERPRETED = OpTiles(Tile(32, 16, 1, 1), Tile(32, 32, 1, 1), Tile(16, 32, 1, 1))
"""Small tiles, so that short test sequences have several; rows and columns differ as on GPUs."""

PARTIAL_SUMS = 1024
"""Number of programs with their own partial table gradients [N].

It fills a GPU several times over, and memory stays linear in N.
"""


@cache
def choose_tiles(arch: int | None, dtype: torch.dtype, head_dim: int) -> OpTiles:
    """Return the tiles for compute capability `arch` (major · 10 + minor), or for the interpreter (None)."""
    if arch is None:
        return INTERPRETED
    if dtype == torch.float32:
        return SINGLE[64 if head_dim <= 64 else 128]
    by_dim = HALF[90 if arch >= 90 else 80]
    return by_dim[min(dim for dim in by_dim if dim >= head_dim)]


@cache
def build_tile_constants(tile: Tile, head_dim: int, strides: tuple[int, ...] = (), *, windowed: bool) -> dict[str, Any]:
    """Return the constants that the op's kernels share. Do not modify the result: it is cached.

    Args:
        strides: for the backward kernels, the row strides of q, k, v and the output's gradient, in elements. As
            constants they are part of the load addresses; as arguments they would take two registers per row. The
            forward kernel takes them as arguments: it is called with many batch sizes and has registers to spare.
    """
    return {
        **dict(zip(("Q_STRIDE", "K_STRIDE", "V_STRIDE", "DO_STRIDE"), strides, strict=False)),
        "HAS_WINDOW": windowed,
        **tile.blocks,
        **build_head_dim_constants(head_dim),
        "INPUT_PRECISION": INPUT_PRECISION,
    }


@cache
def fit_tile_to_rows(tile: Tile, rows: int) -> Tile:
    """Shrink a tile of the forward pass to a small number of rows (decoding). A dot needs at least 16."""
    return replace(tile, block_m=pad_for_dot(min(rows, tile.block_m)))


def count_row_groups(rows: int, block: int, pairs: int, partial: bool) -> int:
    """Return the number of programs per head that share the row blocks.

    With partial sums, the total is limited to about `PARTIAL_SUMS` programs.
    """
    blocks = -(-rows // block)
    return min(blocks, -(-PARTIAL_SUMS // pairs)) if partial else blocks
