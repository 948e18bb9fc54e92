"""Tile sizes: a static table, so that all ranks agree. The kernels are bound by memory; tiles matter little."""

from dataclasses import replace

from kernels.head_dim import pad_for_dot
from kernels.runtime import Tile

NUM_WARPS, NUM_STAGES = 4, 2
TOEPLITZ_FWD = Tile(32, 128, NUM_WARPS, NUM_STAGES)
TOEPLITZ_BWD = Tile(16, 128, NUM_WARPS, NUM_STAGES)
"""Rows per step, and diagonals per program."""
FIRE_FWD = Tile(1, 128, NUM_WARPS, NUM_STAGES)
FIRE_BWD = Tile(1, 64, 8, NUM_STAGES)
"""One row after the other, and columns per step, at most. Four warps hold no step of 32 heads and 32 hidden units."""
FIRE_PRODUCTS = 64 * 32 * 32
"""Columns · heads · hidden units of a step, at most: many heads or units take fewer columns, to stay in registers."""
INTERPRETED_BLOCK = 16
"""The largest of them in the interpreter, so that short sequences in tests have several tiles."""
MAX_PARTS = 512
"""Programs wanted for sums: rows are split until there are as many."""
MAX_HEADS = 64
MAX_WIDTH = 64


def launch_options(arch: int | None, tile: Tile) -> Tile:
    """A tile for compute capability `arch`, or for the interpreter (None)."""
    if arch is not None:
        return tile
    return replace(tile, block_m=min(tile.block_m, INTERPRETED_BLOCK), block_n=min(tile.block_n, INTERPRETED_BLOCK))


def fire_fwd_constants(tile: Tile, heads: int) -> dict[str, int]:
    """The constants of FIRE's forward kernel."""
    return {"BLOCK_N": tile.block_n, "BLOCK_H": pad_for_dot(heads)}


def fire_bwd_constants(tile: Tile, heads: int, width: int) -> dict[str, int]:
    """The constants of FIRE's backward kernel."""
    block_h, block_w = pad_for_dot(heads), pad_for_dot(width)
    return {"BLOCK_N": min(tile.block_n, FIRE_PRODUCTS // (block_h * block_w)), "BLOCK_H": block_h, "BLOCK_W": block_w}


def split_rows(programs: int, rows: int) -> tuple[int, int]:
    """(S, rows per part): how rows are split among programs of which there are `programs` per part."""
    count = min(max(-(-MAX_PARTS // programs), 1), -(-rows // 64))
    rows_per_part = -(-rows // count)
    return -(-rows // rows_per_part), rows_per_part
