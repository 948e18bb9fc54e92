"""Differentiable operator `fire_bias` without atomics: FIRE's network 1 → W → H at x = u(n) / z(i).

It is computed per row and column, so that [R, C, W] is never in memory. H heads, R query rows, C key columns, N
distances, W width, G groups of rows; BLOCK_H and BLOCK_W are H and W padded to powers of two; `x_ptr` points to x. u[n]
= log(1 + c·n) and z[r] = log(1 + c·max(L, i)) + 1e-6 are computed in PyTorch, which propagates their gradients to c and
the multiplier: both are linear in the length.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.bias.toeplitz import (
    MAX_PARTS,
    NUM_STAGES,
    NUM_WARPS,
    check_sizes,
    choose_tile,
    sum_diagonals,
)
from megatron.kernels.head_dim import pad_for_dot
from megatron.kernels.runtime import Tile, cdiv, get_arch, launch_context

FWD_TILE = Tile(1, 128, NUM_WARPS, NUM_STAGES)
BWD_TILE = Tile(1, 64, 8, NUM_STAGES)
"""One row at a time, and the maximum number of columns per step. Four warps cannot hold a step of 32 heads and 32
hidden units.
"""
MAX_PRODUCTS = 64 * 32 * 32
"""Maximum of columns · heads · hidden units per step. With many heads or units a step has fewer columns, to fit in
registers.
"""
MAX_HEADS = 64
MAX_WIDTH = 64


def fire_bias(
    c: Tensor,
    multiplier: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    rows: int,
    columns: int,
    *,
    half_length: float,
    offset: int = 0,
    first_column: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """Return FIRE's bias [H, R, C] (Li et al. 2023, equation 3), differentiable in all its parameters.

    f(log(1 + c·n) / (log(1 + c·max(L, i)) + 1e-6)), j = first_column + column, n = offset + r − column, i = j + n, L =
    multiplier · half_length.

    Args:
        c, multiplier: float32 [1].
        weight1, bias1: first layer, float32 [W, 1] and [W], W at most 64.
        weight2, bias2: second layer, float32 [H, W] and [H], H at most 64.
        rows, columns, offset, dtype, above: as in `toeplitz_bias`; float16 values are not saturated.
        half_length: half the training length.
        first_column: position of column 0 if earlier columns are left out.

    Returns:
        [H, R, C] in `dtype`. Additional memory, also in the backward pass: one float32 [R, C]; never [R, C, W].

    Raises:
        ValueError, RuntimeError: as in `toeplitz_bias`.
    """
    check_sizes(rows, columns, offset, dtype)
    heads, width = weight2.shape
    if heads > MAX_HEADS or width > MAX_WIDTH:
        raise ValueError(f"{heads} heads and width {width}; the maximum is {MAX_HEADS} and {MAX_WIDTH}")
    shapes = {"weight1": (weight1, (width, 1)), "bias1": (bias1, (width,)), "bias2": (bias2, (heads,))}
    shapes |= {"weight2": (weight2, (heads, width)), "c": (c, (1,)), "multiplier": (multiplier, (1,))}
    for name, (x, shape) in shapes.items():
        if x.dtype != torch.float32 or x.shape != shape:
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; it must be float32 {list(shape)}")
    i = first_column + torch.arange(offset, offset + rows, dtype=torch.float32, device=c.device)
    u = torch.log1p(c * torch.arange(offset + rows, dtype=torch.float32, device=c.device))
    z = torch.log1p(c * torch.maximum(multiplier * half_length, i)) + 1e-6
    return _fire(u, z, weight1.squeeze(1), bias1, weight2, bias2, columns, offset, dtype, float(above))


def build_fwd_constants(tile: Tile, heads: int) -> dict[str, int]:
    """Return the constants of the forward kernel."""
    return {"BLOCK_N": tile.block_n, "BLOCK_H": pad_for_dot(heads)}


def build_bwd_constants(tile: Tile, heads: int, width: int) -> dict[str, int]:
    """Return the constants of the backward kernel."""
    block_h, block_w = pad_for_dot(heads), pad_for_dot(width)
    return {"BLOCK_N": min(tile.block_n, MAX_PRODUCTS // (block_h * block_w)), "BLOCK_H": block_h, "BLOCK_W": block_w}


@triton.jit
def relu(x):
    """Return the larger of x and 0. NaN stays NaN, as in PyTorch; a GPU would return 0."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fire_fwd_kernel(
    u_ptr,
    z_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    out_ptr,
    H,
    R,
    C,
    W,
    offset,
    above,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute out[h, r, c] = b2[h] + Σ_k w2[h, k] · relu(w1[k] · x + b1[k]), or `above` if c > offset + r.

    Grid (R, C tiles).
    """
    r = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.arange(0, BLOCK_H)
    n = offset + r - columns
    x = tl.load(u_ptr + n, mask=(n >= 0) & (columns < C), other=0.0) / tl.load(z_ptr + r)
    total = tl.zeros([BLOCK_H, BLOCK_N], tl.float32) + tl.load(b2_ptr + heads, mask=heads < H, other=0.0)[:, None]
    for k in range(0, W):
        hidden = relu(tl.load(w1_ptr + k) * x + tl.load(b1_ptr + k))
        total += tl.load(w2_ptr + heads * W + k, mask=heads < H, other=0.0)[:, None] * hidden[None, :]
    total = tl.where((n >= 0)[None, :], total, above)
    address = out_ptr + heads.to(tl.int64)[:, None] * R * C + tl.cast(r, tl.int64) * C + columns[None, :]
    tl.store(address, total.to(out_ptr.dtype.element_ty), mask=(heads < H)[:, None] & (columns < C)[None, :])


@triton.jit
def _fire_bwd_kernel(
    dout_ptr,
    u_ptr,
    z_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    dx_ptr,
    dz_ptr,
    dw1_ptr,
    db1_ptr,
    dw2_ptr,
    db2_ptr,
    H,
    R,
    C,
    W,
    offset,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Compute dx[r, c] (0 above the diagonal), dz[r], and sums over the rows g, g + G, … of each program. Grid (G,).

    dw1, db1 [G, W], dw2 [G, H, W], db2 [G, H].
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    heads, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_W)
    w1 = tl.load(w1_ptr + width, mask=width < W, other=0.0)
    b1 = tl.load(b1_ptr + width, mask=width < W, other=0.0)
    inside = (heads < H)[:, None] & (width < W)[None, :]
    at = heads[:, None] * W + width[None, :]
    w2 = tl.load(w2_ptr + at, mask=inside, other=0.0)
    dw1 = tl.zeros([BLOCK_W], tl.float32)
    db1 = tl.zeros([BLOCK_W], tl.float32)
    dw2 = tl.zeros([BLOCK_H, BLOCK_W], tl.float32)
    db2 = tl.zeros([BLOCK_H], tl.float32)
    for r in range(group, R, groups):
        z = tl.load(z_ptr + r)
        row = tl.cast(r, tl.int64) * C
        dz = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, C, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            n = offset + r - columns
            seen = (n >= 0) & (columns < C)
            x = tl.load(u_ptr + n, mask=seen, other=0.0) / z
            address = dout_ptr + heads.to(tl.int64)[:, None] * R * C + row + columns[None, :]
            grad = tl.load(address, mask=(heads < H)[:, None] & seen[None, :], other=0.0).to(tl.float32)
            before = x[:, None] * w1[None, :] + b1[None, :]
            dw2 = tl.dot(grad, relu(before), dw2, input_precision="ieee")
            db2 += tl.sum(grad, 1)
            dbefore = tl.dot(tl.trans(grad), w2, input_precision="ieee")
            dbefore = tl.where(before > 0, dbefore, 0.0)
            db1 += tl.sum(dbefore, 0)
            dw1 += tl.sum(dbefore * x[:, None], 0)
            dx = tl.sum(dbefore * w1[None, :], 1)
            dz -= dx * x / z
            tl.store(dx_ptr + row + columns, dx, mask=columns < C)
        tl.store(dz_ptr + r, tl.sum(dz, 0))
    tl.store(dw1_ptr + group * W + width, dw1, mask=width < W)
    tl.store(db1_ptr + group * W + width, db1, mask=width < W)
    tl.store(dw2_ptr + group * H * W + at, dw2, mask=inside)
    tl.store(db2_ptr + group * H + heads, db2, mask=heads < H)


@torch.library.custom_op("farfield::fire_bias", mutates_args=())
def _fire(
    u: Tensor,
    z: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    columns: int,
    offset: int,
    dtype: torch.dtype,
    above: float,
) -> Tensor:
    u, z, w1, b1, w2, b2 = (x.contiguous() for x in (u, z, w1, b1, w2, b2))
    (heads, width), rows = w2.shape, z.shape[0]
    out = torch.empty(heads, rows, columns, dtype=dtype, device=u.device)
    tile = choose_tile(get_arch(u), FWD_TILE)
    with launch_context(u):
        _fire_fwd_kernel[(rows, cdiv(columns, tile.block_n))](
            *(u, z, w1, b1, w2, b2, out, heads, rows, columns, width, offset, above),
            **build_fwd_constants(tile, heads),
            **tile.options,
        )
    return out


@_fire.register_fake
def _(
    u: Tensor,
    z: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    columns: int,
    offset: int,
    dtype: torch.dtype,
    *rest: Any,
) -> Tensor:
    return u.new_empty(w2.shape[0], z.shape[0], columns, dtype=dtype)


@torch.library.custom_op("farfield::fire_bias_backward", mutates_args=())
def _fire_backward(
    grad: Tensor, u: Tensor, z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, offset: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, u, z, w1, b1, w2 = (x.contiguous() for x in (grad, u, z, w1, b1, w2))
    heads, rows, columns = grad.shape
    width = w2.shape[1]
    groups = min(rows, MAX_PARTS)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=grad.device)

    dx, dz = empty(1, rows, columns), empty(rows)
    sums = (empty(groups, width), empty(groups, width), empty(groups, heads, width), empty(groups, heads))
    tile = choose_tile(get_arch(grad), BWD_TILE)
    with launch_context(grad):
        _fire_bwd_kernel[(groups,)](
            *(grad, u, z, w1, b1, w2, dx, dz, *sums, heads, rows, columns, width, offset),
            **build_bwd_constants(tile, heads, width),
            **tile.options,
        )
    du = sum_diagonals(dx, 1 / z, u.shape[0], offset)[0]
    dw1, db1, dw2, db2 = (x.sum(0) for x in sums)
    return du, dz, dw1, db1, dw2, db2


@_fire_backward.register_fake
def _(
    grad: Tensor, u: Tensor, z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = (u.shape, z.shape, w1.shape, b1.shape, w2.shape, w2.shape[:1])
    first, second, third, fourth, fifth, sixth = (u.new_empty(shape) for shape in shapes)
    return first, second, third, fourth, fifth, sixth


def _fire_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, z, w1, b1, w2, _, _, ctx.offset, _, _ = inputs
    ctx.save_for_backward(u, z, w1, b1, w2)


def _fire_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_fire_backward(grad, *ctx.saved_tensors, ctx.offset), None, None, None, None


_fire.register_autograd(_fire_gradients, setup_context=_fire_context)
