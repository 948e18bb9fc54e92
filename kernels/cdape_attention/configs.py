"""Tile sizes by shape: a static table, so that all ranks of a run agree.

Chosen by compiling for sm_80 and sm_90 (`compiled.py`): the most pixels per thread that spill little at k = 3 (16 bytes
at most in half types). One table serves both, since no speed has been measured on either; what differs between chips
belongs here once it has.

H heads, D processor width, k kernel size, p = k//2, R query rows.
"""

from dataclasses import dataclass, replace

import torch

from kernels.rows import padded


@dataclass(frozen=True)
class Tiles:
    """Launch parameters of one kernel."""

    rows: int
    distances: int
    warps: int
    stages: int = 1
    """The loops recompute rather than stream, so nothing is gained by loading ahead, and shared memory is saved."""


def tiles(kernel: str, heads: int, width: int, size: int, rows: int, dtype: torch.dtype) -> Tiles:
    """Launch parameters of a kernel.

    Args:
        kernel: forward, backward or weights.
        rows: query rows of a chunk; few rows (decoding) are covered by flat, wide tiles.
    """
    wide = padded(heads) * padded(width) > 512
    distances = max(32, padded(2 * size))
    if kernel == "forward":
        chosen = Tiles(4, distances, 8 if wide else 4)
    elif kernel == "backward":
        chosen = Tiles(4, distances, 8) if wide and width <= 32 else Tiles(2, distances, 8 if wide else 4)
    elif padded(heads * size) * padded(width) > 2048:
        chosen = Tiles(1, distances, 8)
    else:
        chosen = Tiles(2, distances, 4)
    if dtype == torch.float32:  # exact products keep both operands in registers, in full width
        chosen = replace(chosen, rows=max(chosen.rows // 2, 1), warps=8 if kernel == "weights" else chosen.warps)
    while chosen.rows > 1 and chosen.rows // 2 >= rows:
        chosen = replace(chosen, rows=chosen.rows // 2, distances=chosen.distances * 2)
    return chosen


@dataclass(frozen=True)
class Blocks:
    """Launch parameters of `attend` and `attend_backward`."""

    rows: int
    columns: int
    warps: int
    stages: int


def attend_blocks(kernel: str, rows: int, dtype: torch.dtype) -> Blocks:
    """Launch parameters of a kernel, the same for all head dimensions.

    The kernels wait for memory, so blocks are small: several programs share a processor. With 4 warps they spill where
    the columns of a chunk are no multiple of 16 and each logit needs an address of its own.

    Args:
        kernel: attend or attend_backward.
        rows: query rows of a chunk; a few (decoding) take the lowest block that a matrix product accepts.
    """
    few = rows <= 16
    if dtype == torch.float32:
        return Blocks(16 if few else 32 if kernel == "attend_backward" else 64, 32, 8, 2)
    return Blocks(16, 64, 4, 3) if few else Blocks(64, 32, 8, 3)


WORKSPACE = 1 << 26
"""Entries of one map [B, H, R, C] of a chunk; the backward pass holds three (4 bytes and twice the compute type)."""


def chunk_rows(batch: int, heads: int, rows: int, columns: int) -> int:
    """Query rows per chunk: at most 256, fewer where the maps would be large, so that memory stays linear in C."""
    chunk = 256
    while chunk > 16 and batch * heads * chunk * columns > WORKSPACE:
        chunk //= 2
    return max(min(chunk, rows), 1)


SPREAD = 1024
"""Programs that the backward kernels aim at, by splitting the rows where there are few distances."""


def splits(blocks: int, batch: int, row_blocks: int) -> int:
    """Into how many parts the rows are split: by shape alone, so that sums keep their order from run to run."""
    return max(1, min(row_blocks, SPREAD // max(blocks * batch, 1)))
