"""Static table of tile sizes by shape, so that all ranks of a run agree.

In half precision, the tiles are the fastest of those timed on an H200 at the shape of the 350M model
(`tools/bench/tiles.py`, docs/results/gpu_tiles.json) with few spills on sm_80 and sm_90 (`aot_configs.py`). The kernels
are bound by latency, so small tiles are faster than those with the fewest instructions per score: a multiprocessor runs
more of them at a time. Both architectures use one table; nothing was timed on an A100.

H heads, D processor width, k kernel size, p = k//2, R query rows. Results needed for every launch are cached, because
the host has a few microseconds per launch. Do not modify cached constants.
"""

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from megatron.kernels.cdape_attention import partial_sums
from megatron.kernels.cdape_attention.mixer_operands import BLOCK_ROWS
from megatron.kernels.cdape_attention.scores import GROUP, SMALL_GROUP, count_padded_channels
from megatron.kernels.head_dim import build_head_dim_constants, pad_for_dot
from megatron.kernels.runtime import INPUT_PRECISION, DeviceProperties, Tile, cdiv

NEGATIVE_SLOPE = 0.01
"""Slope of LeakyReLU at negative numbers."""
STAGES = 1
"""Stages of the processor kernels.

Their loops recompute instead of streaming, so prefetching would only cost memory.
"""


@cache
def choose_processor_tile(kernel: str, heads: int, width: int, kernel_size: int, rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a processor kernel; its columns are distances.

    Args:
        kernel: mix_fwd, mix_bwd or mix_bwd_dw.
        rows: query rows of a chunk. A small number (decoding) gets flat, wide tiles.
    """
    wide = pad_for_dot(heads) * pad_for_dot(width) > 512
    distances = max(64, pad_for_dot(2 * kernel_size))
    if kernel == "mix_fwd":
        chosen = Tile(2 if wide and kernel_size > 3 else 4, distances, 4, STAGES)
    elif kernel == "mix_bwd":
        # Two rows halve the barriers per score; wider processors and more taps do not fit the registers with two.
        chosen = Tile(1 if wide or kernel_size > 5 else 2, distances, 4, STAGES)
    else:
        entries = pad_for_dot(count_padded_channels(heads) * kernel_size) * pad_for_dot(width)  # of a weight's gradient
        warps = 2 if entries <= 2048 else 4 if entries <= 4096 else 8
        chosen = Tile(4, distances // 4, warps, STAGES) if warps == 2 else Tile(1, distances // 2, warps, STAGES)
    if dtype == torch.float32:  # exact products keep both operands in registers at full width
        chosen = replace(chosen, block_m=max(chosen.block_m // 2, 1), num_warps=4 if kernel == "mix_fwd" else 8)
    while chosen.block_m > 1 and chosen.block_m // 2 >= rows:
        chosen = replace(chosen, block_m=chosen.block_m // 2, block_n=chosen.block_n * 2)
    return chosen


@cache
def choose_attend_tile(kernel: str, rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile of an attend kernel, the same for all head dimensions.

    The kernels are bound by memory, so blocks are small and several programs share a multiprocessor.

    Args:
        kernel: attend_fwd or attend_sums.
        rows: query rows of a chunk. A small number (decoding) gets the smallest block that a matrix product accepts.
    """
    few = rows <= 16
    if dtype == torch.float32:
        return Tile(16 if few else 32 if kernel == "attend_sums" else 64, 32, 8, 2)
    return Tile(16, 64, 4, 3) if few else Tile(64, 32, 4, 3)


@cache
def choose_product_tile(dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of the product of a map with head rows (`products.py`)."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2)
    return Tile(64, 64, 4, 3 if dim <= 80 else 2)


@cache
def choose_heads_tile(rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a kernel whose programs process all heads of a tile: scores and attend_bwd.

    Such a program waits for each head's rows, so it uses the smallest block that a matrix product accepts.

    Args:
        rows: query rows of a chunk.
        dtype: compute type.
    """
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 32, 8, STAGES)
    return Tile(16, 64, 4, STAGES)


@cache
def build_processor_constants(
    kernel: str,
    heads: int,
    width: int,
    kernel_size: int,
    dtype: torch.dtype,
    tile: Tile,
    *,
    has_bias: bool,
    is_linear: bool = False,
) -> dict[str, Any]:
    """Return the constants of a processor kernel; `is_linear`: without an activation (`weights.WeightShape`)."""
    constants = {
        "CHANNELS": count_padded_channels(heads),
        "D": width,
        "K": kernel_size,
        "BLOCK_D": pad_for_dot(width),
        **tile.blocks,
        "SATURATE": dtype == torch.float16,
        "SLOPE": 1.0 if is_linear else NEGATIVE_SLOPE,
        "INPUT_PRECISION": INPUT_PRECISION,
    }
    if kernel == "mix_bwd_dw":
        return constants | {"BLOCK_KC": pad_for_dot(kernel_size * count_padded_channels(heads))}
    return constants | {"H": heads, "BLOCK_H": pad_for_dot(heads), "HAS_BIAS": has_bias}


@cache
def build_product_constants(dim: int, tile: Tile) -> dict[str, Any]:
    """Return the constants of products of maps with head rows."""
    return {**build_head_dim_constants(dim), **tile.blocks, "INPUT_PRECISION": INPUT_PRECISION}


@cache
def build_qkv_constants(dim: int, tile: Tile, *, add: bool) -> dict[str, Any]:
    """Return the constants of the kernel for the gradients of queries, keys and values.

    Args:
        add: True if sums over rows are added to those of other chunks.
    """
    sums_m, sums_n = partial_sums.BLOCK
    return build_product_constants(dim, tile) | {"SUMS_M": sums_m, "SUMS_N": sums_n, "ADD": add}


@cache
def build_attend_constants(dim: int, tile: Tile, heads: int) -> dict[str, Any]:
    """Return the constants of an attend kernel."""
    return {"H": heads, **build_head_dim_constants(dim), **tile.blocks, "INPUT_PRECISION": INPUT_PRECISION}


@cache
def build_heads_constants(heads: int, dim: int, tile: Tile, dtype: torch.dtype, aligned: bool) -> dict[str, Any]:
    """Return the constants of a kernel whose programs process all heads of a tile and store COUNT of them at a time."""
    count = GROUP if aligned and dtype != torch.float32 else SMALL_GROUP
    return {"CHANNELS": count_padded_channels(heads), "COUNT": count.value, **build_attend_constants(dim, tile, heads)}


WORKSPACE_FRACTION = 1 / 12
"""Maximum fraction of the device's memory for a chunk's maps."""
MIN_ROWS, DEFAULT_ROWS, MAX_ROWS = 16, 1024, 4096
"""Minimum, default and maximum number of rows of a chunk."""


def count_map_bytes(heads: int, dtype: torch.dtype) -> int:
    """Return the memory of a chunk's maps in the backward pass, in bytes per row and column of a sequence.

    S, P and dL are in the compute type, L in float32. S and dL have padded channels. dS, in the compute type, is
    allocated after L is freed. The CUDA kernels need less: P, dL and dS.
    """
    return 2 * count_padded_channels(heads) * dtype.itemsize + heads * (dtype.itemsize + 4)


def compute_max_chunk_rows(heads: int, columns: int) -> int:
    """Return the maximum number of rows of a chunk: offsets in a heads-last map must fit in 32 bits."""
    return ((1 << 31) - 1) // (count_padded_channels(heads) * columns)


def has_enough_blocks(rows: int, batch: int, device: DeviceProperties) -> bool:
    """Return True if the blocks of the CUDA kernels occupy at least two thirds of the multiprocessors.

    With fewer blocks, or fewer rows than a block has, as in decoding, Triton's smaller programs are faster. On an H200,
    the CUDA kernels took 0.62 of the time of Triton's if they occupied all multiprocessors (16 × 2,048 tokens of the
    350M model), and 20 ms instead of 12 if they occupied 16 of 132 (1 × 512 tokens).
    """
    return rows >= BLOCK_ROWS and 3 * cdiv(rows, BLOCK_ROWS) * batch >= 2 * device.multi_processor_count


@lru_cache(maxsize=256)
def choose_chunk_rows(
    batch: int,
    heads: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: DeviceProperties,
    *,
    has_cuda_kernels: bool = False,
) -> int:
    """Return the number of query rows per chunk.

    Chunks are large enough that the host, which launches some ten operations per chunk, is not the bottleneck, and
    that the softmax, with one program per head and row block, and the CUDA kernels, if there are any, occupy the
    multiprocessors. They are smaller if the maps would be too large, so that memory stays linear in C.
    """
    chunk, block = DEFAULT_ROWS, choose_attend_tile("attend_fwd", DEFAULT_ROWS, dtype).block_m
    while chunk < MAX_ROWS and (
        batch * heads * (chunk // block) < device.multi_processor_count
        or (has_cuda_kernels and not has_enough_blocks(chunk, batch, device))
    ):
        chunk *= 2
    room = int(device.total_memory * WORKSPACE_FRACTION) // (batch * columns * count_map_bytes(heads, dtype))
    while chunk > MIN_ROWS and chunk > min(room, compute_max_chunk_rows(heads, columns)):
        chunk //= 2
    if has_cuda_kernels:
        # The last chunk has as many rows as the others, so that it does not lack blocks.
        equal = cdiv(cdiv(rows, cdiv(rows, chunk)), BLOCK_ROWS) * BLOCK_ROWS
        chunk = equal if equal <= chunk and has_enough_blocks(equal, batch, device) else chunk
    return max(min(chunk, rows), 1)


SPREAD = 1024
"""Target number of programs of the backward kernels. With few distances, rows are split to reach it."""


def choose_splits(blocks: int, batch: int, row_blocks: int) -> int:
    """Return the number of parts to split rows into. It depends on the shape alone, so that sums are reproducible."""
    return max(1, min(row_blocks, SPREAD // max(blocks * batch, 1)))
