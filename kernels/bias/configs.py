"""Tile sizes: a static table, so that all ranks agree. The kernels are bound by memory; tiles matter little."""

SPREAD = (32, 128)
"""Rows and columns of the tiles of `spread_kernel`."""
DIAGONAL = (16, 128)
"""Rows per step and diagonals per program of `diagonal_sum_kernel`."""
FIRE_BLOCK = 128
"""Columns per program of `fire_kernel`."""
FIRE_GRADIENT_BLOCK = 64
"""Columns per step of `fire_gradient_kernel`."""
INTERPRETED_BLOCK = 16
"""All of them in the interpreter, so that short sequences in tests have several tiles."""
NUM_WARPS = 4
NUM_STAGES = 2
PARTS = 512
"""Programs wanted for sums: rows are split until there are as many."""
MAX_HEADS = 64
MAX_WIDTH = 64


def parts(programs: int, rows: int) -> tuple[int, int]:
    """(S, rows per part): how rows are split among programs of which there are `programs` per part."""
    count = min(max(-(-PARTS // programs), 1), -(-rows // 64))
    each = -(-rows // count)
    return -(-rows // each), each
