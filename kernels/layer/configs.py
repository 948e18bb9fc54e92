"""Tile sizes, and numbers of programs. All kernels here are bound by memory: a tile is large enough to hide latency."""

from dataclasses import replace
from functools import cache
from typing import Any

import triton
from torch import Tensor

from kernels.runtime import Tile, cdiv, get_device_properties, is_interpreted

TILE_ELEMENTS = 4096
"""Numbers of a tile: 16 for each thread of eight warps."""
MAX_WIDTH = 16384
"""Widest row that a norm's tile holds in registers."""
MAX_HEAD_DIM = 256
WIDE = 4096
"""Rows of more numbers than this take twice the warps."""
ACTIVATION_COLUMNS = 512
LOSS_COLUMNS = 4096
SUM = Tile(64, 64, 4, 1)
"""Partial sums of a step, and columns of a program."""
NORM_PROGRAMS, SMALL_PROGRAMS = 2, 8
"""Programs of a backward kernel that a multiprocessor runs at once: a norm's of eight warps with 128 registers, others'
of four warps. Each writes its own partial sums over the rows, and more programs would wait for their turn."""
INTERPRETED_ROWS, INTERPRETED_PARTS = 2, 3
"""Rows of a tile and partial sums in the interpreter, so that small tensors in tests have several of both."""


def _fit(tile: Tile) -> Tile:
    return replace(tile, block_m=INTERPRETED_ROWS) if is_interpreted() else tile


@cache
def choose_norm_tile(width: int) -> Tile:
    """Return the tile of whole rows of a norm over `width` numbers."""
    columns = triton.next_power_of_2(width)
    return _fit(Tile(max(1, TILE_ELEMENTS // columns), columns, 16 if columns > WIDE else 8, 1))


@cache
def choose_activation_tile(width: int) -> Tile:
    """Return the tile of an activation of rows of `width` numbers."""
    columns = min(ACTIVATION_COLUMNS, triton.next_power_of_2(width))
    return _fit(Tile(2048 // columns, columns, 4, 1))


@cache
def choose_head_tile(head_dim: int) -> Tile:
    """Return the tile of tokens of one head."""
    columns = triton.next_power_of_2(head_dim)
    return _fit(Tile(2048 // columns, columns, 4, 1))


@cache
def choose_loss_tile(vocabulary: int) -> Tile:
    """Return the tile of one token's logits."""
    return Tile(1, 32 if is_interpreted() else min(LOSS_COLUMNS, triton.next_power_of_2(vocabulary)), 8, 1)


def count_parts(x: Tensor, tiles: int, programs: int, columns: int = 1) -> int:
    """Return how many programs share the tiles of rows, each of which sums up its own.

    Args:
        x: a tensor on the device.
        tiles: tiles along the rows.
        programs: on a multiprocessor at once.
        columns: programs side by side along the columns.
    """
    if is_interpreted():
        return min(tiles, INTERPRETED_PARTS)
    wanted = programs * get_device_properties(x).multi_processor_count
    return min(tiles, max(1, cdiv(wanted, columns)))


@cache
def build_constants(tile: Tile, **values: Any) -> dict[str, Any]:
    """Return a kernel's constants: the same dictionary for the same values, as `launch` wants it."""
    return {**values, **tile.blocks}
