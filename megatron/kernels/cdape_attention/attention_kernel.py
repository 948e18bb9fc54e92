"""Inputs and launch of the CUDA kernel for the forward pass, which stores no map (`cuda/attention.h`).

B batch, H heads, R query rows of a chunk, C columns of its maps, d head dimension.
"""

import ctypes

from torch import Tensor

from megatron.kernels.cdape_attention.geometry import (
    SIZE_LIMITS,
    WIDTH,
    KernelFamily,
    KernelForm,
    MixerKernel,
    Tile,
    count_fragment_window_bytes,
    count_run_bytes,
)
from megatron.kernels.cdape_attention.head_products import AttentionOutput, get_head_strides
from megatron.kernels.cdape_attention.logit_kernels import LogitArgs, build_logit_args
from megatron.kernels.cdape_attention.mixer import ChunkInputs, Launch
from megatron.kernels.cdape_attention.mixer_operands import BIAS_COPIES
from megatron.kernels.runtime import cdiv


def _count_bytes(tile: Tile, form: KernelForm) -> int:
    return count_fragment_window_bytes(tile, form) + count_run_bytes(tile, form, by_rows=True)


def _fits_registers(tile: Tile, form: KernelForm) -> bool:
    """Return True if a thread has registers for the output of its rows, of which it has twice as many with 32 rows."""
    return tile.rows == 16 or (form.dim <= 64 and form.kernel_size <= 3 and form.width <= WIDTH)


ATTENTION_KERNELS = KernelFamily(
    *("attention.h", "Attention<{}>", "AttentionArgs"),
    (Tile(32, 32), Tile(16, 64)),
    _count_bytes,
    SIZE_LIMITS,
    _fits_registers,
)
"""Kernels for the forward pass."""


class AttentionArgs(ctypes.Structure):
    """Arguments of the kernel, as declared in `cuda/attention.h`."""

    _fields_ = (
        ("inputs", LogitArgs),
        *((name, ctypes.c_void_p) for name in ("values", "sinks", "offsets", "output", "residue", "stats")),
        *((name, ctypes.c_int) for name in ("v_stride", "output_stride", "output_row", "stats_stride")),
        ("total_offset", ctypes.c_longlong),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "v_batch", "output_batch", "stats_batch")),
    )


def compute_attention(
    inputs: ChunkInputs,
    values: Tensor,
    sinks: Tensor | None,
    offsets: Tensor | None,
    attended: AttentionOutput,
    kernel: MixerKernel,
    launch: Launch,
) -> None:
    """Write a chunk's output and softmax statistics.

    Args:
        values: values [B, H, C or more, d]; the last two dimensions are contiguous.
        sinks: logits of keys without a value, float32 [H], or None.
        offsets: row terms that the logits omit, to subtract from the sinks: float32 [B, H, R] with the strides of the
            statistics, or None.
        attended: results to write for the chunk's rows.
        kernel: a kernel of `ATTENTION_KERNELS`.
        launch: runs a kernel on a grid of (blocks, sequences), on a GPU or in a test's emulator.
    """
    output, stats, residue = attended
    batch, _, rows, _ = inputs.queries.shape
    assert residue is None or residue.stride() == output.stride()
    assert offsets is None or offsets.stride() == stats.stride()[1:]
    size = output.element_size()
    output_batch, output_stride, output_row = (stride * size for stride in get_head_strides(output))
    args = AttentionArgs(
        build_logit_args(inputs, BIAS_COPIES),
        *(None if x is None else x.data_ptr() for x in (values, sinks, offsets, output, residue, stats)),
        *(values.stride(1) * size, output_stride, output_row, stats.stride(2) * 4),
        stats.stride(0) * 4,
        *(x.stride(0) * size for x in (inputs.queries, inputs.keys, values)),
        *(output_batch, stats.stride(1) * 4),
    )
    launch(kernel.code, (cdiv(rows, kernel.tile.rows), batch), args)
