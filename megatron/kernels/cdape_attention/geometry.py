"""Geometries of the mixer's CUDA kernels (`cuda/geometry.h`), and the choice of one for a GPU's shared memory.

d head dimension, k kernel size, p = k//2.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.kernels.cuda.compile import RESERVED_BYTES, CudaKernel
from megatron.kernels.runtime import cdiv

FOLDER = Path(__file__).with_name("cuda")
HEADS, WIDTH = 16, 32
"""Number of heads in a group, and of widths in a part of the weights of one group."""
ELEMENTS = {torch.bfloat16: "Bfloat16", torch.float16: "Float16"}
"""Names of the compute types in CUDA."""
BLOCK_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of a block, by compute capability (CUDA C++ Programming Guide)."""
MAX_WARPS = 8
"""Maximum number of warps with 255 registers on a multiprocessor."""


class Tile(NamedTuple):
    """Rows and columns of one tile of a thread block."""

    rows: int
    columns: int
    held_tensors: int = 1
    """Number of tensors whose rows, for all heads, are kept in shared memory."""

    @property
    def warps(self) -> int:
        """Number of warps. Each mixes 16 rows and 8 columns."""
        return self.rows // 16 * (self.columns // 8)


class KernelForm(NamedTuple):
    """Sizes and types for which a kernel is compiled, without its tile."""

    kernel_size: int
    dim: int
    dtype: torch.dtype
    is_local: bool = False
    """True if each row has its own first column (`mixer.ColumnSpans`)."""
    heads: int = HEADS
    """Number of heads, padded by `pad_sizes`."""
    width: int = WIDTH
    """Width of the processor, padded by `pad_sizes`."""
    is_gated: bool = False
    """True if the bias is a row term plus a column term (`gate_terms.py`)."""
    is_linear: bool = False
    """True without an activation between both convolutions."""

    @property
    def weight_slices(self) -> int:
        """Number of slices of the width with separate blocks for the gradients of weights (`cuda/mixer_backward.h`)."""
        return self.width // {1: 32, 3: 32, 5: 16, 7: 8}[self.kernel_size]

    @property
    def padding(self) -> int:
        """Number of columns that the taps reach to each side, p."""
        return self.kernel_size // 2


class MixerKernel(NamedTuple):
    """Kernel with one geometry."""

    code: CudaKernel
    tile: Tile
    resident_blocks: int
    """Number of blocks that share a multiprocessor."""
    form: KernelForm


class SizeLimit(NamedTuple):
    """Largest sizes of a processor that a kernel supports in combination."""

    kernel_size: int
    heads: int
    width: int

    def covers(self, kernel_size: int, heads: int, width: int) -> bool:
        return kernel_size <= self.kernel_size and heads <= self.heads and width <= self.width


SIZE_LIMITS = (SizeLimit(7, HEADS, WIDTH), SizeLimit(5, HEADS, 2 * WIDTH))
"""Limits of all kernels. The kernel for logits also supports more heads."""


def pad_sizes(heads: int, width: int) -> tuple[int, int]:
    """Return the padded number of heads and the padded width with which kernels compute.

    Heads are padded to one or two groups, and the width to whole parts, which are half as wide for two groups.
    """
    groups = cdiv(heads, HEADS)
    part_width = WIDTH // groups
    return groups * HEADS, cdiv(width, part_width) * part_width


class KernelFamily(NamedTuple):
    """Kernel with all its geometries."""

    header: str
    name: str
    """Name of the kernel. {0} is replaced by its geometry, {1} by true if a block keeps two tensors, else false."""
    arguments: str
    tiles: tuple[Tile, ...]
    count_bytes: Callable[[Tile, KernelForm], int]
    """Function that returns the shared memory of a block without the kept tensors, in bytes."""
    limits: tuple[SizeLimit, ...]
    fits_registers: Callable[[Tile, KernelForm], bool] = lambda tile, form: True
    """Function that returns True if registers hold the sums of a tile for these sizes."""

    def covers(self, form: KernelForm) -> bool:
        """Return True if the sizes are within one of `limits`."""
        return any(limit.covers(form.kernel_size, form.heads, form.width) for limit in self.limits)

    def build(self, tile: Tile, form: KernelForm, arch: int) -> MixerKernel:
        """Describe the kernel with a geometry.

        Args:
            arch: compute capability as major · 10 + minor, which determines how many blocks share a multiprocessor.
        """
        shared_bytes = tile.held_tensors * tile.rows * form.heads * 2 * form.dim + self.count_bytes(tile, form)
        sizes = f"{form.padding}, {tile.columns}, {tile.rows // 16}, {form.dim}"
        variant = f"{ELEMENTS[form.dtype]}, {str(form.is_local).lower()}"
        bias = f", {str(form.is_gated).lower()}" if form.is_gated or form.is_linear else ""
        geometry = f"Geometry<{sizes}, {variant}, {form.heads}, {form.width}{bias}{', true' * form.is_linear}>"
        code = CudaKernel(
            FOLDER,
            self.header,
            self.name.format(geometry, str(tile.held_tensors == 2).lower()),
            self.arguments,
            32 * tile.warps,
            shared_bytes,
        )
        room = (BLOCK_BYTES[arch] + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)
        return MixerKernel(code, tile, min(room, MAX_WARPS // tile.warps), form)


@cache
def choose_kernel(family: KernelFamily, form: KernelForm, arch: int) -> MixerKernel | None:
    """Return the kernel for a GPU, or None if the family does not cover the form or no geometry fits its shared memory.

    The choice maximizes, in this order: the warps on a multiprocessor, which hide latency; the rows, which share keys;
    the tensors kept in shared memory, which are read only once; and the blocks, one of which can compute while another
    waits at a barrier.
    """
    if arch not in BLOCK_BYTES or not family.covers(form):
        return None
    kernels = [family.build(tile, form, arch) for tile in family.tiles if family.fits_registers(tile, form)]

    def rank(kernel: MixerKernel) -> tuple[int, ...]:
        tile, blocks = kernel.tile, kernel.resident_blocks
        return blocks * tile.warps, tile.rows, tile.held_tensors, blocks

    best = max(kernels, key=rank)
    return best if best.resident_blocks else None


def count_fragment_window_bytes(tile: Tile, form: KernelForm) -> int:
    """Return the bytes of a `FragmentWindow` (`cuda/windows.h`)."""
    quads = tile.columns // 4 + (2 if form.padding > 2 else 1)
    return form.heads // 16 * (tile.rows // 16) * 4 * (4 * quads * 160 + 32)


def count_pair_window_bytes(tile: Tile) -> int:
    """Return the bytes of a `PairWindow` (`cuda/windows.h`)."""
    return tile.rows * (HEADS // 2 * (tile.columns + 8) + 20) * 4


def count_run_bytes(tile: Tile, form: KernelForm, *, by_rows: bool) -> int:
    """Return the bytes of `Runs` (`cuda/runs.h`)."""
    needed = tile.columns + 2 * form.padding * (tile.columns // 8)
    is_wide = tile.columns >= 32 and not by_rows
    stride = min(cdiv(needed - bank, 32) * 32 + bank for bank in ((8,) if is_wide else (12, 20)))
    return tile.rows * (form.heads // 2 * stride + (4 if is_wide else 18)) * 4


def count_diagonal_bytes(tile: Tile, form: KernelForm) -> int:
    """Return the bytes of `Diagonals` (`cuda/diagonals.h`)."""
    return tile.warps * 3 * 8 * (form.width + form.heads) * 4
