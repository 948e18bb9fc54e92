"""Tile sizes as a static table, so that all ranks agree. The kernels are memory-bound, so tiles matter little."""

from dataclasses import replace

from megatron.kernels.head_dim import pad_for_dot
from megatron.kernels.runtime import Tile

NUM_WARPS, NUM_STAGES = 4, 2
TOEPLITZ_FWD = Tile(32, 128, NUM_WARPS, NUM_STAGES)
TOEPLITZ_BWD = Tile(16, 128, NUM_WARPS, NUM_STAGES)
"""Rows per step, and diagonals per program."""
FIRE_FWD = Tile(1, 128, NUM_WARPS, NUM_STAGES)
FIRE_BWD = Tile(1, 64, 8, NUM_STAGES)
"""One row at a time, and the maximum number of columns per step. Four warps cannot hold a step of 32 heads and 32
hidden units.
"""
FIRE_PRODUCTS = 64 * 32 * 32
"""Maximum of columns · heads · hidden units per step. With many heads or units a step has fewer columns, to fit in
registers.
"""
INTERPRETED_BLOCK = 16
"""Maximum block size in the interpreter, so that short sequences in tests have several tiles."""
MAX_PARTS = 512
"""Target number of programs for sums: rows are split until it is reached."""
MAX_HEADS = 64
MAX_WIDTH = 64


def launch_options(arch: int | None, tile: Tile) -> Tile:
    """Return a tile for compute capability `arch`, or for the interpreter (None)."""
    if arch is not None:
        return tile
    return replace(tile, block_m=min(tile.block_m, INTERPRETED_BLOCK), block_n=min(tile.block_n, INTERPRETED_BLOCK))


def build_fire_fwd_constants(tile: Tile, heads: int) -> dict[str, int]:
    """Return the constants of FIRE's forward kernel."""
    return {"BLOCK_N": tile.block_n, "BLOCK_H": pad_for_dot(heads)}


def build_fire_bwd_constants(tile: Tile, heads: int, width: int) -> dict[str, int]:
    """Return the constants of FIRE's backward kernel."""
    block_h, block_w = pad_for_dot(heads), pad_for_dot(width)
    return {"BLOCK_N": min(tile.block_n, FIRE_PRODUCTS // (block_h * block_w)), "BLOCK_H": block_h, "BLOCK_W": block_w}


def split_rows(programs: int, rows: int) -> tuple[int, int]:
    """Split rows into parts with `programs` programs each. Return the number of parts and the rows per part."""
    count = min(max(-(-MAX_PARTS // programs), 1), -(-rows // 64))
    rows_per_part = -(-rows // count)
    return -(-rows // rows_per_part), rows_per_part
