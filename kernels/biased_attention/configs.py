"""Tile sizes by compute capability, type and head dimension: a static table, so that all ranks agree.

The tiles of `bwd_dq`, whose kernel sums over diagonals, are square.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from kernels.head_dim import head_dim_constants, pad_for_dot
from kernels.runtime import INPUT_PRECISION, Tile


@dataclass(frozen=True)
class BackwardTile(Tile):
    """The tile of a backward kernel."""

    joins_bias: bool = False
    """Whether products of half types are added to the bias, which spares an instruction and takes registers."""

    @property
    def blocks(self) -> dict[str, int]:
        return super().blocks | {"JOINS_BIAS": self.joins_bias}


@dataclass(frozen=True)
class OpTiles:
    """The tiles of the op's three kernels."""

    fwd: Tile
    bwd_dq: BackwardTile
    bwd_dkdv: BackwardTile


HALF = {
    80: {
        64: OpTiles(Tile(128, 128, 8, 2), BackwardTile(64, 64, 4, 1), BackwardTile(32, 128, 8, 2)),
        80: OpTiles(Tile(128, 128, 8, 2), BackwardTile(64, 64, 4, 1), BackwardTile(32, 128, 8, 2)),
        96: OpTiles(Tile(128, 64, 8, 2), BackwardTile(64, 64, 4, 1), BackwardTile(32, 128, 8, 1)),
        128: OpTiles(Tile(128, 64, 8, 2), BackwardTile(64, 64, 8, 1), BackwardTile(64, 64, 8, 2)),
    },
    90: {
        64: OpTiles(Tile(64, 32, 4, 3), BackwardTile(64, 64, 4, 3, True), BackwardTile(32, 64, 4, 2, True)),
        80: OpTiles(Tile(128, 128, 8, 2), BackwardTile(64, 64, 4, 2, True), BackwardTile(64, 128, 8, 2, True)),
        96: OpTiles(Tile(128, 128, 8, 2), BackwardTile(64, 64, 4, 1, True), BackwardTile(64, 128, 8, 2, True)),
        128: OpTiles(Tile(128, 64, 8, 2), BackwardTile(64, 64, 4, 1, True), BackwardTile(32, 128, 8, 2, True)),
    },
}
"""float16 and bfloat16, by architecture and largest head dimension.

Of the tiles that stay within the budget of spills those are chosen that take the fewest instructions for a score
(`kernels/instructions.py`), spilled values counted; two stages, which load ahead, if they cost less than a tenth more
and spill no more. Where four warps hold a tile of `bwd_dq`, eight take 1.4 to 2 times as many: most of what a warp
does there does not become less with its share. What spills then mostly does so around the loop over columns, not in it.
For d = 64 on sm_90 the tiles are the fastest of ten that were timed on an H200 (docs/results/gpu_tiles.json).
With one stage ptxas compiles `bwd_dq` wrongly on sm_90 at d = 80 without a table (`kernels/uniform_registers.py`).
"""

SINGLE = {
    64: OpTiles(Tile(64, 32, 8, 2), BackwardTile(32, 32, 4, 2), BackwardTile(32, 32, 4, 2)),
    128: OpTiles(Tile(64, 32, 8, 2), BackwardTile(32, 32, 8, 2), BackwardTile(32, 32, 8, 2)),
}
"""float32, whose products are exact to float32 (no TF32), keyed by the largest head dimension."""

INTERPRETED = OpTiles(Tile(32, 16, 1, 1), BackwardTile(32, 32, 1, 1, True), BackwardTile(16, 32, 1, 1, True))
"""Small tiles, so that short sequences in tests have several; rows and columns differ as on GPUs."""

PARTIAL_SUMS = 1024
"""Programs that keep partial table gradients [N]; enough to fill a GPU several times, and memory stays linear in N."""


@cache
def choose_tiles(arch: int | None, dtype: torch.dtype, head_dim: int) -> OpTiles:
    """The tiles for compute capability `arch` (major · 10 + minor), or for the interpreter (None)."""
    if arch is None:
        return INTERPRETED
    if dtype == torch.float32:
        return SINGLE[64 if head_dim <= 64 else 128]
    by_dim = HALF[90 if arch >= 90 else 80]
    return by_dim[min(dim for dim in by_dim if dim >= head_dim)]


@cache
def tile_constants(tile: Tile, head_dim: int, strides: tuple[int, ...] = (), *, windowed: bool) -> dict[str, Any]:
    """The constants that the op's kernels share; not to be changed, since the next launch gets the same.

    Args:
        strides: of the backward kernels, elements from one row to the next of q, k, v and the output's gradient, so
            that the addresses of a tile's rows are constants of its loads: as arguments they take two registers a row.
            The forward kernel, which is called with many batch sizes and has the registers, gets them as arguments.
    """
    return {
        **dict(zip(("Q_STRIDE", "K_STRIDE", "V_STRIDE", "DO_STRIDE"), strides, strict=False)),
        "HAS_WINDOW": windowed,
        **tile.blocks,
        **head_dim_constants(head_dim),
        "INPUT_PRECISION": INPUT_PRECISION,
    }


@cache
def fit_tile_to_rows(tile: Tile, rows: int) -> Tile:
    """A tile of the forward pass: a few rows (decoding) do not need the whole of it, of which a dot needs 16."""
    return replace(tile, block_m=pad_for_dot(min(rows, tile.block_m)))


def count_row_groups(rows: int, block: int, pairs: int, partial: bool) -> int:
    """Programs per head that share the row blocks; with partial sums no more than `PARTIAL_SUMS` programs or so."""
    blocks = -(-rows // block)
    return min(blocks, -(-PARTIAL_SUMS // pairs)) if partial else blocks
