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

from kernels.cdape_attention.mixer_operands import BLOCK_ROWS, HEADS, TABLE_FRONT, WIDTH, MixerOperands, find_pointer
from kernels.cdape_attention.weights import WeightShape
from kernels.cuda.compile import load_nvrtc
from kernels.cuda.kernel import CudaKernel
from kernels.jit_build import CompileError
from kernels.runtime import DeviceProperties, cdiv

FOLDER = Path(__file__).with_name("cuda")
VARIABLE = "FARFIELD_CUDA_MIXER"
"""Environment variable that turns all CUDA kernels off if it is 0: Triton's then compute everything."""
ARCHS = (90,)
"""Compute capabilities whose shared memory holds a block of the kernels."""
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
    operands: MixerOperands
    layer: int
    """Number of the layer among those of the operands."""
    position: int
    """Position of the chunk's first row."""
    first_row: int
    """Row of E that belongs to the chunk's first row."""


class MixerGradients(NamedTuple):
    """Gradients of a chunk, by programs of the kernels, in float32."""

    tables: Tensor
    """Gradients of U from distance −p on and of the bias, [programs, n, 48], see `unpack_tables`."""
    edge: Tensor
    """Gradient of E, [B, R, p, 32]."""
    weights: Tensor
    """Gradients of both weights, [programs, 2 · k · 512], see `unpack_weights`."""


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
    operands, layer = inputs.operands, inputs.layer
    shape, fragments, edge = operands.shape, operands.fragments, operands.wide_edge
    batch, rows, _, columns, _ = inputs.dlogits.shape
    blocks = cdiv(rows, BLOCK_ROWS)
    num_rows = inputs.position + blocks * BLOCK_ROWS + shape.padding
    float32: dict[str, Any] = {"dtype": torch.float32, "device": edge.device}
    dtables = torch.zeros(batch * blocks, num_rows, WIDTH + HEADS, **float32)
    dedge = torch.empty(batch, rows, shape.padding, WIDTH, **float32)
    dweights = torch.empty(batch * blocks, 2 * fragments.w1.shape[1], **float32)
    args = MixerBackwardArgs(
        build_score_inputs(inputs.queries, inputs.keys, columns, inputs.position),
        inputs.dlogits.data_ptr(),
        find_pointer(operands.entries, layer),
        find_pointer(edge, layer) + inputs.first_row * edge.stride(1) * edge.element_size(),
        *(find_pointer(x, layer) for x in (fragments.w1, fragments.w2_back, fragments.w1_back)),
        *(x.data_ptr() for x in (dscores, dtables, dedge, dweights)),
        *(TABLE_FRONT, num_rows),
        *(x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, inputs.dlogits, dedge, dscores)),
    )
    launch(TO_SCORES, (blocks, batch), args)
    launch(TO_WEIGHTS, (blocks, batch), args)
    return MixerGradients(dtables, dedge, dweights)
