"""Logits by a CUDA kernel (`cuda/mixer_forward.h`): what it reads, and how it is launched.

B batch, H heads, R query rows of a chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. The kernel pads H to 16 and D to 32.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.mixer import (
    BLOCK_ROWS,
    FOLDER,
    Launch,
    ScoreInputs,
    build_score_inputs,
)
from kernels.cdape_attention.mixer_operands import WIDTH, build_bias, build_group_table, exchange_fragments
from kernels.cdape_attention.weights import PackedWeights, WeightShape
from kernels.cuda.kernel import CudaKernel
from kernels.runtime import cdiv

NARROW = CudaKernel(FOLDER, "mixer_forward.h", "MixerForward<1, 16>", "MixerForwardArgs", 128, 114176)
WIDE = CudaKernel(FOLDER, "mixer_forward.h", "MixerForward<1, 32>", "MixerForwardArgs", 256, 153344)
KERNELS = {80: WIDE, 90: NARROW}
"""The kernel for a compute capability: two blocks of 4 warps on a multiprocessor, or one of 8 where one fits."""


class LogitArgs(ctypes.Structure):
    """Inputs of the logits, as `cuda/logits.h` declares them."""

    _fields_ = (
        ("scores", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("table", "edge", "w1", "w2", "bias")),
        *((name, ctypes.c_int) for name in ("table_group", "bias_front", "bias_stride")),
    )


class MixerForwardArgs(ctypes.Structure):
    """Arguments of the kernel, as `cuda/mixer_forward.h` declares them."""

    _fields_ = (
        ("inputs", LogitArgs),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "logits_batch")),
    )


class LogitInputs(NamedTuple):
    """Inputs of the kernel for one chunk of rows."""

    queries: Tensor
    """bfloat16 [B, H, R, 64], scaled: rows of a tensor whose last two dimensions are contiguous."""
    keys: Tensor
    """bfloat16 [B, H, C or more, 64], alike; C is the position after the chunk's last row."""
    contributions: Tensor
    """float32 [p + N, D]: U from distance −p on (`bias_product.py`)."""
    edge: Tensor
    """float32 [R, p, D]: E of the chunk's rows."""
    bias_table: Tensor
    """float32 [H, N], added to the logits; [H, 0] where there is none."""
    weights: PackedWeights
    shape: WeightShape
    position: int
    """Position of the chunk's first row."""


def compute_logits(inputs: LogitInputs, kernel: CudaKernel, launch: Launch) -> Tensor:
    """Return the logits of a chunk, float32 [B, H, R, C], undefined where a row does not see a column.

    Args:
        kernel: one of `KERNELS`.
        launch: runs a kernel on a grid of (blocks, sequences): on a GPU, or in a test's emulator.
    """
    batch, heads, rows, _ = inputs.queries.shape
    columns = inputs.position + rows
    packed = pack_inputs(inputs)
    logits = torch.empty(batch, heads, rows, columns, dtype=torch.float32, device=inputs.queries.device)
    strides = (x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, logits))
    launch(kernel, (cdiv(rows, BLOCK_ROWS), batch), MixerForwardArgs(packed.args, logits.data_ptr(), *strides))
    return logits


class PackedInputs(NamedTuple):
    """A kernel's arguments, and the tensors that they point to."""

    args: LogitArgs
    tensors: tuple[Tensor, ...]


def pack_inputs(inputs: LogitInputs, bias_copies: int = 1) -> PackedInputs:
    """Pack what the logits of a chunk are computed from.

    Args:
        bias_copies: see `build_bias`.
    """
    shape, padding, position = inputs.shape, inputs.shape.padding, inputs.position
    rows = inputs.queries.shape[2]
    distances = position + cdiv(rows, BLOCK_ROWS) * BLOCK_ROWS
    table, group = build_group_table(inputs.contributions, padding, position, distances)
    bias, bias_front = build_bias(inputs.bias_table, inputs.weights.b2, position, distances, bias_copies)
    edge = F.pad(inputs.edge, (0, WIDTH - shape.width))
    tensors = (table, edge, *exchange_fragments(inputs.weights), bias)
    args = LogitArgs(
        build_score_inputs(inputs.queries, inputs.keys, position + rows, position),
        *(x.data_ptr() for x in tensors),
        *(group, bias_front, bias.shape[-1]),
    )
    return PackedInputs(args, tensors)
