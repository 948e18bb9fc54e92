"""The processor's backward pass by CUDA kernels (`cuda/mixer_backward.h`): what they read, how they are launched, and
what is made of their sums.

B batch, H heads, R query rows of a chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. The kernels pad H to 16 and D to 32.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.mixer_operands import (
    HEADS,
    TABLE_FRONT,
    WIDTH,
    build_fragments,
    build_table,
    list_head_columns,
    unpack_weights,
)
from kernels.cdape_attention.weights import PackedWeights, WeightShape
from kernels.cuda.compile import load_nvrtc
from kernels.cuda.kernel import CudaKernel
from kernels.jit_build import CompileError
from kernels.runtime import DeviceProperties, cdiv

FOLDER = Path(__file__).with_name("cuda")
VARIABLE = "FARFIELD_CUDA_MIXER"
"""Environment variable that turns all CUDA kernels off if it is 0: Triton's then compute everything."""
ARCHS = (90,)
"""Compute capabilities whose shared memory holds a block of the kernels."""
BLOCK_ROWS = 32
TO_SCORES = CudaKernel(FOLDER, "mixer_backward.h", "MixerBackward<1, true, false>", "MixerBackwardArgs", 256, 230912)
TO_WEIGHTS = CudaKernel(FOLDER, "mixer_backward.h", "MixerBackward<1, false, true>", "MixerBackwardArgs", 256, 152576)


Launch = Callable[[CudaKernel, tuple[int, int], ctypes.Structure], None]
"""Runs a kernel on a grid of (blocks, sequences)."""


class ScoreInputs(ctypes.Structure):
    """Inputs of scores, as `cuda/scores.h` declares them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k")),
        *((name, ctypes.c_int) for name in ("q_stride", "k_stride", "q_row", "heads", "rows", "columns", "position")),
    )


class MixerBackwardArgs(ctypes.Structure):
    """Arguments of both kernels, as `cuda/mixer_backward.h` declares them."""

    _fields_ = (
        ("scores", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("dlogits", "table", "edge", "w1", "w2", "w1_back")),
        *((name, ctypes.c_void_p) for name in ("dscores", "dtables", "dedge", "dweights")),
        *((name, ctypes.c_int) for name in ("table_front", "dtable_rows")),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "map_batch", "edge_batch", "dscores_batch")),
    )


class MixerInputs(NamedTuple):
    """Inputs of both kernels for one chunk of rows."""

    queries: Tensor
    """bfloat16 [B, H, R, 64], scaled: rows of a tensor whose last two dimensions are contiguous."""
    keys: Tensor
    """bfloat16 [B, H, C or more, 64], alike."""
    dlogits: Tensor
    """bfloat16 [B, R, 8, C, 2], heads in pairs; undefined where a row does not see the column."""
    contributions: Tensor
    """float32 [p + N + …, D]: U from distance −p on (`bias_product.py`)."""
    edge: Tensor
    """float32 [R, p, D]: E of the chunk's rows."""
    weights: PackedWeights
    shape: WeightShape
    position: int
    """Position of the chunk's first row."""


class MixerGradients(NamedTuple):
    """Gradients of a chunk, summed over sequences and rows."""

    contributions: Tensor
    """Gradient of U, float32 [n, D], from distance −p on."""
    bias_table: Tensor
    """Gradient of the bias table in the logits, float32 [n, H], by distance."""
    edge: Tensor
    """Gradient of E, float32 [B, R, p, D]."""
    patches: Tensor
    """Gradients of both weights in the layout of `PackedWeights`, float32 [2, KC, DP]."""


def is_enabled() -> bool:
    """True unless the environment forbids these kernels."""
    return os.environ.get(VARIABLE) != "0"


@cache
def has_compiler() -> bool:
    """True if NVRTC is here; if not, a warning says so once."""
    try:
        load_nvrtc()
    except CompileError as failure:
        warnings.warn(f"CDAPE's CUDA kernels are left, Triton's take their place: {failure}", stacklevel=2)
        return False
    return True


def fills_device(rows: int, batch: int, device: DeviceProperties) -> bool:
    """True if a chunk has a block for each multiprocessor, on which no second one fits.

    With fewer, Triton's smaller programs are faster: on an H200 a micro-batch of 512 tokens of the 350M model, which
    has 16 blocks, took 20 ms with these kernels and kept the GPU busy for 12 ms with Triton's (docs/log.md).
    """
    return cdiv(rows, BLOCK_ROWS) * batch >= device.multi_processor_count


def is_supported(shape: WeightShape, dtype: torch.dtype, dim: int, columns: int) -> bool:
    """True if the kernels compute these shapes: three taps, 9 to 16 heads of 64, widths of 17 to 32."""
    return (
        dtype == torch.bfloat16
        and dim == 64
        and shape.kernel_size == 3
        and HEADS // 2 < shape.heads <= HEADS
        and WIDTH // 2 < shape.width <= WIDTH
        and columns % 8 == 0
    )


def build_score_inputs(queries: Tensor, keys: Tensor, columns: int, position: int) -> ScoreInputs:
    """Describe a chunk's queries [B, H, R, 64], of any strides but the last, and keys [B, H, C or more, 64], whose last
    two dimensions are contiguous, for a kernel."""
    heads, rows = queries.shape[1:3]
    strides = (size * queries.element_size() for size in (queries.stride(1), keys.stride(1), queries.stride(2)))
    return ScoreInputs(queries.data_ptr(), keys.data_ptr(), *strides, heads, rows, columns, position)


def differentiate_mixer(inputs: MixerInputs, dscores: Tensor, launch: Launch) -> MixerGradients:
    """Run both kernels for a chunk.

    Args:
        dscores: bfloat16 [B, H, R, C], written where a row sees a column, and zero in the rest of the diagonal tiles.
        launch: runs a kernel on a grid of (blocks, sequences): on a GPU, or in a test's emulator.
    """
    shape, padding = inputs.shape, inputs.shape.padding
    batch, rows, _, columns, _ = inputs.dlogits.shape
    blocks = cdiv(rows, BLOCK_ROWS)
    table = build_table(inputs.contributions, padding, inputs.position + blocks * BLOCK_ROWS)
    edge = F.pad(inputs.edge, (0, WIDTH - shape.width))
    fragments = build_fragments(inputs.weights)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": table.device}
    dtables = torch.zeros(batch * blocks, inputs.position + blocks * BLOCK_ROWS + padding, WIDTH + HEADS, **float32)
    dedge = torch.empty(batch, rows, padding, WIDTH, **float32)
    dweights = torch.empty(batch * blocks, 2 * shape.kernel_size * 4 * 32 * 4, **float32)
    args = MixerBackwardArgs(
        build_score_inputs(inputs.queries, inputs.keys, columns, inputs.position),
        *(x.data_ptr() for x in (inputs.dlogits, table, edge, *fragments, dscores, dtables, dedge, dweights)),
        *(TABLE_FRONT, dtables.shape[1]),
        *(x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, inputs.dlogits, dedge, dscores)),
    )
    launch(TO_SCORES, (blocks, batch), args)
    launch(TO_WEIGHTS, (blocks, batch), args)
    sums = dtables.sum(0)
    return MixerGradients(
        sums[:, : shape.width],
        sums.index_select(1, list_head_columns(sums.device))[:, : shape.heads],
        dedge[..., : shape.width],
        unpack_weights(dweights.sum(0), shape),
    )
