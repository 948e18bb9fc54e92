"""Inputs and launch of the CUDA kernel for P and dL (`cuda/logit_gradient.h`).

B batch, H heads, R query rows of a chunk, C columns of its maps. The kernel pads H to 16.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.geometry import (
    BACKWARD_LIMITS,
    HEADS,
    KernelFamily,
    KernelForm,
    MixerKernel,
    Tile,
    count_fragment_window_bytes,
    count_run_bytes,
)
from megatron.kernels.cdape_attention.mixer import Launch, ScoreInputs, build_score_inputs
from megatron.kernels.cdape_attention.mixer_forward import LogitArgs, LogitInputs, build_logit_args
from megatron.kernels.cdape_attention.mixer_operands import BIAS_COPIES
from megatron.kernels.runtime import cdiv


def _count_bytes(tile: Tile, form: KernelForm) -> int:
    stats = HEADS * tile.rows * 8 + 128 * tile.warps
    return count_fragment_window_bytes(tile, form) + count_run_bytes(tile, form, by_rows=True) + stats


KERNELS = KernelFamily(
    *("logit_gradient.h", "LogitGradient<{}, {}>", "LogitGradientArgs"),
    (Tile(32, 32, 2), Tile(16, 64, 2), Tile(16, 64, 1)),
    _count_bytes,
    BACKWARD_LIMITS,
)


class LogitGradientArgs(ctypes.Structure):
    """Arguments of the kernel, as declared in `cuda/logit_gradient.h`."""

    _fields_ = (
        ("inputs", LogitArgs),
        ("values", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("output", "residue", "stats", "sums", "probabilities", "dlogits")),
        ("stats_stride", ctypes.c_int),
        ("total_offset", ctypes.c_longlong),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "value_batch", "dout_batch", "stats_batch")),
        *((name, ctypes.c_longlong) for name in ("probabilities_batch", "dlogits_batch")),
    )


class SoftmaxChunk(NamedTuple):
    """Inputs and results of a chunk's softmax."""

    values: Tensor
    """[B, H, C or more, d]; the last two dimensions are contiguous."""
    output: Tensor
    """[B, H, R, d]; the last dimension is contiguous."""
    residue: Tensor
    """Rounding error of the output, in its type and with its strides."""
    doutput: Tensor
    """Gradient of the output, with the same strides."""
    stats: Tensor
    """float32 [2, B, H, R]: maximum (in base 2) and sum of exponentials."""


class LogitGradients(NamedTuple):
    """Maps of a chunk, undefined where a row does not see a column."""

    probabilities: Tensor
    """P, [B, H, R, C]."""
    dlogits: Tensor
    """dL, [B, R, 8, C, 2], heads in pairs."""


def differentiate_softmax(
    inputs: LogitInputs, attended: SoftmaxChunk, sums: Tensor, kernel: MixerKernel, launch: Launch
) -> LogitGradients:
    """Compute P and dL of a chunk from the inputs of its logits.

    Args:
        sums: float32 [B, H, R] with the strides of `attended.stats`; each row's Σ P ∘ dP is written here.
        kernel: a kernel of `KERNELS`.
        launch: runs a kernel on a grid of (blocks, sequences), on a GPU or in a test's emulator.
    """
    batch, heads, rows, _ = inputs.queries.shape
    columns = inputs.position + rows
    values, output, residue, doutput, stats = attended
    assert output.stride() == residue.stride() == doutput.stride()
    assert sums.stride() == stats.stride()[1:]
    probabilities = torch.empty(batch, heads, rows, columns, dtype=values.dtype, device=values.device)
    dlogits = torch.empty(batch, rows, HEADS // 2, columns, 2, dtype=values.dtype, device=values.device)
    args = LogitGradientArgs(
        build_logit_args(inputs, BIAS_COPIES),
        build_score_inputs(doutput, values, columns, inputs.position),
        *(x.data_ptr() for x in (output, residue, stats, sums, probabilities, dlogits)),
        *(stats.stride(2) * 4, stats.stride(0) * 4),
        *(x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, values, doutput)),
        *(sums.stride(0) * 4, probabilities.stride(0) * 2, dlogits.stride(0) * 2),
    )
    launch(kernel.code, (cdiv(rows, kernel.tile.rows), batch), args)
    return LogitGradients(probabilities, dlogits)
