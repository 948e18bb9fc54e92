"""The geometries of the mixer's CUDA kernels (`cuda/geometry.h`), and the choice of one by what a GPU has room for.

d head dimension, p = k//2.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.kernels.cuda.compile import CudaKernel

FOLDER = Path(__file__).with_name("cuda")
HEADS, WIDTH = 16, 32
ELEMENTS = {torch.bfloat16: "Bfloat16", torch.float16: "Float16"}
"""Names of the types in which models compute."""
BLOCK_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of a block, by compute capability (CUDA C++ Programming Guide)."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes for each block. A multiprocessor has so much more than its largest block."""
MAX_WARPS = 8
"""Warps of 255 registers that a multiprocessor holds."""


class Tile(NamedTuple):
    """Rows and columns of one tile of a thread block."""

    rows: int
    columns: int
    held_tensors: int = 1
    """Number of tensors of which it holds its rows, all heads, in shared memory."""

    @property
    def warps(self) -> int:
        """Number of warps, each of which mixes 16 rows and 8 columns."""
        return self.rows // 16 * (self.columns // 8)


class MixerKernel(NamedTuple):
    """Kernel of one geometry."""

    code: CudaKernel
    tile: Tile
    resident_blocks: int
    """Blocks that share a multiprocessor."""


class KernelFamily(NamedTuple):
    """A kernel in all its geometries."""

    header: str
    name: str
    """Name of the kernel. {0} is replaced by its geometry, and {1} by whether a block holds two tensors."""
    arguments: str
    tiles: tuple[tuple[Tile, int], ...]
    """Each tile, and the rest of the shared memory that a block needs for it."""

    def build(
        self, tile: Tile, dim: int, dtype: torch.dtype, arch: int, *, is_local: bool = False, is_gated: bool = False
    ) -> MixerKernel:
        """Describe the kernel of a geometry.

        Args:
            is_local: True if each row sees columns from a first one of its own (`mixer.Spans`).
            is_gated: True if the bias is a term of the row and one of the column (`gate_terms.py`).
            arch: compute capability as major · 10 + minor, which decides how many blocks share a multiprocessor.
        """
        shared_bytes = tile.held_tensors * tile.rows * HEADS * 2 * dim + dict(self.tiles)[tile]
        flags = str(is_local).lower() + ", true" * is_gated
        geometry = f"Geometry<1, {tile.columns}, {tile.rows // 16}, {dim}, {ELEMENTS[dtype]}, {flags}>"
        code = CudaKernel(
            FOLDER,
            self.header,
            self.name.format(geometry, str(tile.held_tensors == 2).lower()),
            self.arguments,
            32 * tile.warps,
            shared_bytes,
        )
        room = (BLOCK_BYTES[arch] + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)
        return MixerKernel(code, tile, min(room, MAX_WARPS // tile.warps))


@cache
def choose_kernel(
    family: KernelFamily, dim: int, dtype: torch.dtype, arch: int, *, is_local: bool = False, is_gated: bool = False
) -> MixerKernel | None:
    """Return the kernel for a GPU, or None if no geometry fits its shared memory.

    Most warps on a multiprocessor come first, since few hide little latency; then the most rows, which share keys; then
    what is in shared memory and not read again; then several blocks, of which one computes while another waits at a
    barrier.
    """
    if arch not in BLOCK_BYTES:
        return None
    kernels = [family.build(tile, dim, dtype, arch, is_local=is_local, is_gated=is_gated) for tile, _ in family.tiles]

    def rank(kernel: MixerKernel) -> tuple[int, ...]:
        tile, blocks = kernel.tile, kernel.resident_blocks
        return blocks * tile.warps, tile.rows, tile.held_tensors, blocks

    best = max(kernels, key=rank)
    return best if best.resident_blocks else None
