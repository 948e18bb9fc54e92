"""Sums over programs: a backward kernel leaves the partial sums of its programs, and this adds them up in order.

Nothing is added atomically, so gradients are bitwise repeatable. P partial sums, K gradients, C columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.layer import configs
from kernels.runtime import cdiv


@triton.jit
def _sum_partials_kernel(partial_ptr, out_ptr, P, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[c] = sum over p of partial[p, c]. Grid (columns in tiles)."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_M):
        parts = start + tl.arange(0, BLOCK_M)[:, None]
        total += tl.load(partial_ptr + parts * C + columns, mask=(parts < P) & (columns < C), other=0.0)
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + own, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=own < C)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of float32 [P, …] over its first dimension, rounded once, to `dtype`."""
    out = torch.empty(partial.shape[1:], dtype=dtype, device=partial.device)
    tile = configs.SUM
    launch(
        _sum_partials_kernel,
        (cdiv(out.numel(), tile.block_n), 1, 1),
        (partial, out, partial.shape[0], out.numel()),
        configs.build_constants(tile),
        tile.options,
    )
    return out
