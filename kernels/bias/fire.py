"""FIRE's network 1 → W → H at x = u(n) / z(i), per row and column, so that [R, C, W] is never in memory.

H heads, R query rows, C key columns, N distances, W width, G groups of rows; HP and WP are H and W as powers of two.
U[n] = log(1 + c·n) and Z[r] = log(1 + c·max(L, i)) + 1e-6 are made in PyTorch, which carries their gradients on to c
and the multiplier: both are linear in the length.
"""

import triton
import triton.language as tl


@triton.jit
def fire_kernel(
    U,
    Z,
    W1,
    B1,
    W2,
    B2,
    OUT,
    H,
    R,
    C,
    W,
    offset,
    above,
    BLOCK: tl.constexpr,
    HP: tl.constexpr,
):
    """OUT[h, r, c] = B2[h] + Σ_k W2[h, k] · relu(W1[k] · x + B1[k]); `above` where c > offset + r.

    Grid (R, C tiles).
    """
    r = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.arange(0, HP)
    n = offset + r - columns
    x = tl.load(U + n, mask=(n >= 0) & (columns < C), other=0.0) / tl.load(Z + r)
    total = tl.zeros([HP, BLOCK], tl.float32) + tl.load(B2 + heads, mask=heads < H, other=0.0)[:, None]
    for k in range(0, W):
        hidden = tl.maximum(tl.load(W1 + k) * x + tl.load(B1 + k), 0.0)
        total += tl.load(W2 + heads * W + k, mask=heads < H, other=0.0)[:, None] * hidden[None, :]
    total = tl.where((n >= 0)[None, :], total, above)
    address = OUT + heads.to(tl.int64)[:, None] * R * C + tl.cast(r, tl.int64) * C + columns[None, :]
    tl.store(address, total.to(OUT.dtype.element_ty), mask=(heads < H)[:, None] & (columns < C)[None, :])


@triton.jit
def fire_gradient_kernel(
    GRAD,
    U,
    Z,
    W1,
    B1,
    W2,
    DX,
    DZ,
    DW1,
    DB1,
    DW2,
    DB2,
    H,
    R,
    C,
    W,
    offset,
    BLOCK: tl.constexpr,
    HP: tl.constexpr,
    WP: tl.constexpr,
):
    """DX[r, c] (zero above the diagonal), DZ[r], and sums over the rows g, g + G, … of each program. Grid (G,).

    DW1, DB1 [G, W], DW2 [G, H, W], DB2 [G, H].
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    heads, width = tl.arange(0, HP), tl.arange(0, WP)
    w1 = tl.load(W1 + width, mask=width < W, other=0.0)
    b1 = tl.load(B1 + width, mask=width < W, other=0.0)
    inside = (heads < H)[:, None] & (width < W)[None, :]
    at = heads[:, None] * W + width[None, :]
    w2 = tl.load(W2 + at, mask=inside, other=0.0)
    dw1 = tl.zeros([WP], tl.float32)
    db1 = tl.zeros([WP], tl.float32)
    dw2 = tl.zeros([HP, WP], tl.float32)
    db2 = tl.zeros([HP], tl.float32)
    for r in range(group, R, groups):
        z = tl.load(Z + r)
        row = tl.cast(r, tl.int64) * C
        dz = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            n = offset + r - columns
            seen = (n >= 0) & (columns < C)
            x = tl.load(U + n, mask=seen, other=0.0) / z
            address = GRAD + heads.to(tl.int64)[:, None] * R * C + row + columns[None, :]
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
            tl.store(DX + row + columns, dx, mask=columns < C)
        tl.store(DZ + r, tl.sum(dz, 0))
    tl.store(DW1 + group * W + width, dw1, mask=width < W)
    tl.store(DB1 + group * W + width, db1, mask=width < W)
    tl.store(DW2 + group * H * W + at, dw2, mask=inside)
    tl.store(DB2 + group * H + heads, db2, mask=heads < H)
