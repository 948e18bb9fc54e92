"""Inputs and launch of the CUDA kernels for logits, and for P and dL.

The kernels are in `cuda/mixer_forward.h` and `cuda/logit_gradient.h`.

B batch, H heads, R query rows of a chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. `geometry.pad_sizes` pads H and D.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.gate_terms import GateInputs
from megatron.kernels.cdape_attention.geometry import (
    HEADS,
    SIZE_LIMITS,
    WIDTH,
    KernelFamily,
    KernelForm,
    MixerKernel,
    SizeLimit,
    Tile,
    count_fragment_window_bytes,
    count_run_bytes,
)
from megatron.kernels.cdape_attention.mixer import ChunkInputs, Launch, ScoreInputs, build_score_inputs
from megatron.kernels.cdape_attention.mixer_operands import BIAS_COPIES, find_pointer
from megatron.kernels.runtime import cdiv


def _count_forward_bytes(tile: Tile, form: KernelForm) -> int:
    return count_fragment_window_bytes(tile, form) + count_run_bytes(tile, form, by_rows=False)


LOGIT_KERNELS = KernelFamily(
    *("mixer_forward.h", "MixerForward<{}>", "MixerForwardArgs"),
    (Tile(32, 16), Tile(32, 32), Tile(16, 64), Tile(16, 32)),
    _count_forward_bytes,
    (*SIZE_LIMITS, SizeLimit(3, 2 * HEADS, WIDTH)),
)
"""Kernels for logits. For other sizes, Triton's kernels need no more instructions (README.md)."""


class LogitArgs(ctypes.Structure):
    """Inputs of the logits, as declared in `cuda/logits.h`."""

    _fields_ = (
        ("scores", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("table", "edge", "w1", "w2", "bias")),
        *((name, ctypes.c_int) for name in ("table_group", "bias_front", "bias_stride")),
        ("gates", GateInputs),
    )


class MixerForwardArgs(ctypes.Structure):
    """Arguments of the kernel, as declared in `cuda/mixer_forward.h`."""

    _fields_ = (
        ("inputs", LogitArgs),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "logits_batch")),
    )


def compute_logits(inputs: ChunkInputs, kernel: MixerKernel, launch: Launch) -> Tensor:
    """Return the logits of a chunk, float32 [B, H, R, C], undefined in columns that a row does not see.

    Args:
        kernel: a kernel of `LOGIT_KERNELS`.
        launch: runs a kernel on a grid of (blocks, sequences), on a GPU or in a test's emulator.
    """
    batch, heads, rows, _ = inputs.queries.shape
    columns = inputs.position + rows
    args = build_logit_args(inputs)
    logits = torch.empty(batch, heads, rows, columns, dtype=torch.float32, device=inputs.queries.device)
    strides = (x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, logits))
    launch(kernel.code, (cdiv(rows, kernel.tile.rows), batch), MixerForwardArgs(args, logits.data_ptr(), *strides))
    return logits


def build_logit_args(inputs: ChunkInputs, bias_copies: int = 1) -> LogitArgs:
    """Build the kernel arguments that describe the inputs of a chunk's logits.

    Args:
        bias_copies: number of copies of the bias that the kernel reads, counted from the last.
    """
    operands, layer, position = inputs.operands, inputs.layer, inputs.position
    scores = build_score_inputs(inputs.queries, inputs.keys, position + inputs.queries.shape[2], position, inputs.spans)
    if inputs.gates is not None:
        gates = inputs.gates
        weights = gates.fragments.w1.data_ptr(), gates.fragments.w2.data_ptr()
        return LogitArgs(
            *(scores, None, gates.edge.data_ptr(), *weights, gates.bias_pointer),
            *(0, 0, gates.bias.shape[-1], gates.inputs),
        )
    assert operands is not None
    tables, edge = operands.find_logit_tables(position), operands.wide_edge
    unread = (tables.bias.shape[1] - bias_copies) * tables.bias.stride(1) * tables.bias.element_size()
    return LogitArgs(
        scores,
        find_pointer(tables.table, layer),
        find_pointer(edge, layer) + inputs.first_row * edge.stride(1) * edge.element_size(),
        *(find_pointer(x, layer) for x in (operands.fragments.w1, operands.fragments.w2)),
        find_pointer(tables.bias, layer) + unread,
        *(tables.group, tables.bias_front, tables.bias.shape[-1]),
    )


def _count_gradient_bytes(tile: Tile, form: KernelForm) -> int:
    stats = HEADS * tile.rows * 8 + 128 * tile.warps
    return count_fragment_window_bytes(tile, form) + count_run_bytes(tile, form, by_rows=True) + stats


LOGIT_GRADIENT_KERNELS = KernelFamily(
    *("logit_gradient.h", "LogitGradient<{}, {}>", "LogitGradientArgs"),
    (Tile(32, 32, 2), Tile(16, 64, 2), Tile(16, 64, 1), Tile(16, 32, 1)),
    _count_gradient_bytes,
    SIZE_LIMITS,
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
    """Values, [B, H, C or more, d]; the last two dimensions are contiguous."""
    output: Tensor
    """Output of the forward pass, [B, H, R, d]; the last dimension is contiguous."""
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
    inputs: ChunkInputs, attended: SoftmaxChunk, sums: Tensor, kernel: MixerKernel, launch: Launch
) -> LogitGradients:
    """Compute P and dL of a chunk from the inputs of its logits.

    Args:
        sums: float32 [B, H, R] with the strides of `attended.stats`; each row's Σ P ∘ dP is written here.
        kernel: a kernel of `LOGIT_GRADIENT_KERNELS`.
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
