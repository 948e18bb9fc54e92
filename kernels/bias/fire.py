"""FIRE's network 1 → W → H at x = u(n) / z(i), per row and column, so that [R, C, W] is never in memory.

H heads, R query rows, C key columns, N distances, W width, G groups of rows; BLOCK_H and BLOCK_W are H and W as powers
of two; `x_ptr` points to x. u[n] = log(1 + c·n) and z[r] = log(1 + c·max(L, i)) + 1e-6 are
made in PyTorch, which carries their gradients on to c and the multiplier: both are linear in the length.
"""

import triton
import triton.language as tl


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
    """out[h, r, c] = b2[h] + Σ_k w2[h, k] · relu(w1[k] · x + b1[k]); `above` where c > offset + r.

    Grid (R, C tiles).
    """
    r = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.arange(0, BLOCK_H)
    n = offset + r - columns
    x = tl.load(u_ptr + n, mask=(n >= 0) & (columns < C), other=0.0) / tl.load(z_ptr + r)
    total = tl.zeros([BLOCK_H, BLOCK_N], tl.float32) + tl.load(b2_ptr + heads, mask=heads < H, other=0.0)[:, None]
    for k in range(0, W):
        hidden = tl.maximum(tl.load(w1_ptr + k) * x + tl.load(b1_ptr + k), 0.0)
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
    """dx[r, c] (zero above the diagonal), dz[r], and sums over the rows g, g + G, … of each program. Grid (G,).

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
            dw2 = tl.dot(grad, tl.maximum(before, 0.0), dw2, input_precision="ieee")
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
