"""Cross entropy from logits in their own type: log Z and the label's logit in one reading, the gradient in another.

T tokens, B sequences, V logits of a token, soft-capped if there is a cap: c·tanh(x/c).
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.layer import configs
from kernels.runtime import launch_context


@triton.jit
def _cap(x, cap, CAPPED: tl.constexpr):
    if CAPPED:
        x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
    return x


@triton.jit
def _loss_fwd_kernel(
    logits_ptr,
    labels_ptr,
    log_z_ptr,
    picked_ptr,
    T,
    B,
    V,
    first,
    cap,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """log Z, and the logit of the label, 0 if it isn't among these: float32 [B, T]. Grid (T · B).

    logits are [T, B, V] and those of the tokens from `first` on; labels int64 [B, T].
    """
    row = tl.program_id(0)
    own = (row % B) * T + row // B
    at = logits_ptr + row.to(tl.int64) * V
    largest = float("-inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, V, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < V
        x = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, _cap(x, cap, CAPPED), float("-inf"))
        bound = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - bound) + tl.exp(x - bound)
        largest = bound
    log_z = largest + tl.log(tl.sum(total, 0))
    label = tl.load(labels_ptr + own) - first
    is_here = (label >= 0) & (label < V)
    picked = tl.load(at + label, mask=is_here, other=0.0).to(tl.float32)
    tl.store(log_z_ptr + own, log_z)
    tl.store(picked_ptr + own, tl.where(is_here, _cap(picked, cap, CAPPED), 0.0))


@triton.jit
def _loss_bwd_kernel(
    logits_ptr,
    labels_ptr,
    log_z_ptr,
    dloss_ptr,
    dlog_z_ptr,
    T,
    B,
    V,
    first,
    cap,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The logits' gradient, in their place. Grid (T · B, columns in tiles). dlog_z_ptr may be None."""
    row = tl.program_id(0)
    own = (row % B) * T + row // B
    dloss = tl.load(dloss_ptr + own)
    dlog_z = dloss
    if dlog_z_ptr is not None:
        dlog_z += tl.load(dlog_z_ptr + own)
    log_z = tl.load(log_z_ptr + own)
    label = tl.load(labels_ptr + own) - first
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < V
    at = logits_ptr + row.to(tl.int64) * V + columns
    x = _cap(tl.load(at, mask=inside, other=0.0).to(tl.float32), cap, CAPPED)
    grad = tl.exp(x - log_z) * dlog_z - tl.where(columns == label, dloss, 0.0)
    if CAPPED:
        grad *= 1.0 - (x / cap) * (x / cap)
    tl.store(at, grad.to(logits_ptr.dtype.element_ty), mask=inside)


Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From log Z and label logits of a part of the vocabulary to those of the whole."""


def cross_entropy(
    logits: Tensor, labels: Tensor, cap: float | None = None, *, first: int = 0, combine: Combine | None = None
) -> tuple[Tensor, Tensor]:
    """Return each token's cross entropy in nats and log Z, float32 [B, T] each.

    The backward pass overwrites the logits with their gradient: nothing else may read them.

    Args:
        logits: [T, B, V].
        labels: int64 [B, T].
        cap: bound of the logits, None for none.
        first: the first token of a rank's part of the vocabulary.
        combine: joins what ranks have that divide the vocabulary; None if there is one rank.
    """
    losses, log_z = _CrossEntropy.apply(logits, labels, cap, first, combine)
    return losses, log_z


def _launch(
    kernel: Any, grid: tuple[int, int, int], logits: Tensor, tensors: tuple[Any, ...], first: int, cap: Any
) -> None:
    length, batch, vocabulary = logits.shape
    tile = configs.choose_loss_tile(vocabulary)
    with launch_context(logits):
        launch(
            kernel,
            grid,
            (logits, *tensors, length, batch, vocabulary, first, 1.0 if cap is None else float(cap)),
            configs.build_constants(tile, CAPPED=cap is not None),
            tile.options,
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, cap: float | None, first: int, combine: Combine | None
    ) -> tuple[Tensor, Tensor]:
        logits, labels = logits.contiguous(), labels.contiguous()
        length, batch, _ = logits.shape
        log_z, picked = torch.empty((2, batch, length), dtype=torch.float32, device=logits.device).unbind()
        _launch(_loss_fwd_kernel, (length * batch, 1, 1), logits, (labels, log_z, picked), first, cap)
        if combine is not None:
            log_z, picked = combine(log_z, picked)
        losses = log_z - picked
        ctx.save_for_backward(logits, labels, log_z)
        ctx.set_materialize_grads(False)
        ctx.cap, ctx.first = cap, first
        return losses, log_z

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, dlog_z: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, log_z = ctx.saved_tensors
        dloss = torch.zeros_like(log_z) if dloss is None else dloss.contiguous()
        dlog_z = None if dlog_z is None else dlog_z.contiguous()
        length, batch, vocabulary = logits.shape
        columns = -(-vocabulary // configs.choose_loss_tile(vocabulary).block_n)
        tensors = (labels, log_z, dloss, dlog_z)
        _launch(_loss_bwd_kernel, (length * batch, columns, 1), logits, tensors, ctx.first, ctx.cap)
        torch.autograd.graph.increment_version(logits)  # a second backward pass is then an error
        return logits.detach(), None, None, None, None
