"""Tile sizes by compute capability, type and head dimension: a static table, so that all ranks agree.

BM rows and BN columns of a tile; those of `rows`, the kernel that makes dq and the table gradients, are square.
"""

from dataclasses import dataclass

import torch

from kernels.rows import padded


@dataclass(frozen=True)
class Tiles:
    """Tile and launch parameters of one kernel."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config:
    """The three kernels of the op."""

    forward: Tiles
    rows: Tiles
    columns: Tiles


HALF = {
    (80, 64): Config(Tiles(128, 64, 4, 2), Tiles(64, 64, 8, 1), Tiles(32, 64, 4, 2)),
    (80, 96): Config(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(32, 64, 4, 2)),
    (80, 128): Config(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    (90, 64): Config(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 2)),
    (90, 96): Config(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    (90, 128): Config(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 128, 8, 2)),
}
"""float16 and bfloat16, keyed by (architecture, largest head dimension). Chosen by compiled registers and spills.

`rows` at 64 × 64 needs more registers than there are. On sm_80 up to d = 96 one stage instead of two never spills more
and often far less (bias + weight, d = 80: 296 bytes, not 660); at d = 128 and on sm_90 it is worse for some tables.
"""

SINGLE = {
    64: Config(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    128: Config(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
}
"""float32, whose products are exact to float32 (no TF32), keyed by the largest head dimension."""

INTERPRETED = Config(Tiles(32, 16, 1, 1), Tiles(32, 32, 1, 1), Tiles(16, 32, 1, 1))
"""Small tiles, so that short sequences in tests have several; BM and BN differ as on GPUs."""

PARTIAL_SUMS = 1024
"""Programs that keep partial table gradients [N]; enough to fill a GPU several times, and memory stays linear in N."""


def config(arch: int | None, dtype: torch.dtype, head_dim: int) -> Config:
    """The tiles for compute capability `arch` (major · 10 + minor), or for the interpreter (None)."""
    if arch is None:
        return INTERPRETED
    if dtype == torch.float32:
        return SINGLE[64 if head_dim <= 64 else 128]
    return HALF[90 if arch >= 90 else 80, 64 if head_dim <= 64 else 96 if head_dim <= 96 else 128]


def row_block(rows: int, tiles: Tiles) -> int:
    """BM of the forward pass: a few rows (decoding) do not need the whole tile, of which a dot needs 16."""
    return padded(min(rows, tiles.BM))


def groups(rows: int, block: int, pairs: int, partial: bool) -> int:
    """Programs per head that share the row blocks; with partial sums no more than `PARTIAL_SUMS` programs or so."""
    blocks = -(-rows // block)
    return min(blocks, -(-PARTIAL_SUMS // pairs)) if partial else blocks
