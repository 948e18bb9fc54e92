"""Tensor functions that several encodings share: arithmetic in the precision that it needs, and a table over distances
n = i − j spread into a matrix over rows and columns."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.position.token_range import TokenRange


def is_divided_by_zero_3(parameter: Tensor) -> bool:
    """Does DeepSpeed's ZeRO 3 divide a parameter, and gather it around each call of its module alone?"""
    return hasattr(parameter, "ds_id")


def has_parameters_divided_by_zero_3(module: nn.Module) -> bool:
    """The same of a module's parameters. They are not read as attributes, which DeepSpeed would gather from all ranks
    in a forward pass: ranks may ask this where others do not."""
    return any(is_divided_by_zero_3(parameter) for parameter in module.parameters())


def promote_to_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is wider already (float64 in tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pow_with_finite_gradient(n: Tensor, exponent: Tensor) -> Tensor:
    """n^exponent for distances n ≥ 0 and exponents > 0, broadcast against each other.

    The derivative n^r·ln(n) is 0·(−∞) = NaN at n = 0 when left to autograd; its limit is 0, which is what this gives.
    """
    positive = n > 0
    return torch.where(positive, torch.pow(torch.where(positive, n, 1.0), exponent), 0.0)


def rotary_frequencies(half: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """base^(−m/half), m = 0 … half − 1: float64 [half]."""
    return base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)


def position_angles(positions: Tensor, half: int, base: float) -> Tensor:
    """positions [T] times the frequencies base^(−m/half), m = 0 … half − 1: float64 [T, half].

    In float64, because at position 65,536 a float32 angle is already off by 0.004 rad.
    """
    return positions.double()[:, None] * rotary_frequencies(half, base, positions.device)


def sinusoidal_embeddings(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """[sin; cos] of the angles of positions [T]: [T, dim]."""
    angle = position_angles(positions, dim // 2, base)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x·cos + swap(x)·sin, swap exchanging the halves of the first r dimensions; the others stay.

    Args:
        x: [..., T, d].
        cos, sin: [T, r], or of each head [H, T, r]; of each pair both halves have the same cosine, and sines of
            opposite signs.
    """
    result: Tensor = _Rotation.apply(x, cos, sin)
    return result


class _Rotation(torch.autograd.Function):
    """x·cos + swap(x)·sin, swap exchanging the halves of the dimensions that are turned; the others stay.

    Written by hand, since autograd would cut and join the halves in each direction, and fill what it cuts with zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Computed in the type of cos and sin."""
        ctx.save_for_backward(cos, sin)
        result, turned, swapped = _allocate_turned(x, cos.shape[-1])
        torch.addcmul(x[..., : cos.shape[-1]] * cos, swapped, sin, out=turned)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The turn back: swap(sin) is −sin."""
        cos, sin = ctx.saved_tensors
        result, turned, swapped = _allocate_turned(grad, cos.shape[-1])
        # Not addcmul, which may round once where the sum of two terms rounds each.
        torch.sub(grad[..., : cos.shape[-1]] * cos, swapped * sin, out=turned)
        return result, None, None


def _allocate_turned(x: Tensor, rotated: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the result, in which what is not turned stands already; what of it will be turned; and x with the halves
    of that exchanged."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = result
    if rotated < x.shape[-1]:
        result[..., rotated:] = x[..., rotated:]
        turned = result[..., :rotated]
    return result, turned, x[..., :rotated].roll(rotated // 2, -1)


def _sum_diagonals(x: Tensor) -> Tensor:
    """Sums of x [H, R, C] over equal j − i: [H, R + C − 1], the one of the last row's first column last."""
    heads, rows, columns = x.shape
    if 0 < columns < rows:  # along the shorter side: what is sheared has min(R, C) · (R + C) entries
        return _sum_diagonals(x.mT).flip(-1)
    # Rows of `width` entries, read as rows of one more: row r has moved left by r, what falls off joins the zeros
    # at the end of the row before, and equal j − i stand in one column (those below 0 count from the end).
    width = rows + columns
    sheared = x.new_zeros(heads, rows * (width + 1))
    sheared[:, : rows * width].view(heads, rows, width)[..., :columns] = x
    shifted = sheared.view(heads, rows, width + 1).sum(1)
    return torch.cat([shifted[:, width + 2 - rows :], shifted[:, :columns]], dim=1).flip(-1)


class _Toeplitz(torch.autograd.Function):
    """table [H, N] → matrix [H, R, C] with matrix[h, r, c] = table[h, i − j], and the table's first entry where j > i;
    but the first columns are those of the edge [H, R, e], if there is one.

    Backward sums along diagonals by shearing the gradient, which is a plain reduction: no scatter, hence fast on CPU
    and deterministic on GPUs.
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, edge: Tensor | None, query: TokenRange, key: TokenRange, channels_last: bool
    ) -> Tensor:
        ctx.query, ctx.key, ctx.size = query, key, table.shape[-1]
        ctx.edge = 0 if edge is None else edge.shape[-1]
        # Row r reads a line of distances from entry rows − 1 − r on: a gather of the line alone, then copies of its
        # windows, last first. Selected, they lie row after row; flipped, they would lie column after column, and what
        # reads the matrix beside the scores would take several times as long.
        far = query.stop - 1 - key.start
        line = torch.arange(far, far - (query.length + key.length - 1), -1, device=table.device).clamp_(min=0)
        last_first = torch.arange(query.length - 1, -1, -1, device=table.device)
        if channels_last:
            windows = table.t()[line].unfold(0, key.length, 1).transpose(1, 2)  # [R, C, H]
            matrix = windows.index_select(0, last_first).permute(2, 0, 1)
        else:
            windows = table[:, line].unfold(1, key.length, 1).transpose(0, 1)  # [R, H, C]
            matrix = windows.index_select(0, last_first).transpose(0, 1)
        if edge is not None:
            matrix[..., : ctx.edge] = edge
        return matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge_grad, grad = grad[..., : ctx.edge], grad[..., ctx.edge :]
        heads, rows, columns = grad.shape
        diagonal = _sum_diagonals(grad)
        count = rows + columns - 1
        first = ctx.query.start - (ctx.key.stop - 1)
        result = grad.new_zeros(heads, ctx.size)
        negative = min(max(-first, 0), count)  # entries with n < 0 read table[0]
        result[:, 0] += diagonal[:, :negative].sum(-1)
        start = first + negative
        result[:, start : start + count - negative] += diagonal[:, negative:]
        return result, edge_grad if ctx.needs_input_grad[1] else None, None, None, None


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap·tanh(x/cap), which is x where that is small and never more than cap (Gemma 2, arXiv:2408.00118); x itself
    without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def toeplitz(
    table: Tensor, query: TokenRange, key: TokenRange, *, edge: Tensor | None = None, channels_last: bool = False
) -> Tensor:
    """Spread a table over n = i − j into a matrix [H, R, C]; entries with j > i hold the table's value at n = 0.

    Args:
        table: [H, N] with N > the largest distance.
        edge: [H, R, e], stands in the first e columns instead.
        channels_last: H lies innermost in memory.

    Raises:
        ValueError: an edge or channels last at sampled positions.
    """
    if query.sampled is None:
        return _Toeplitz.apply(table, edge, query, key, channels_last)
    if edge is not None or channels_last:
        raise ValueError("sampled positions have neither an edge nor channels last")
    # Sampled positions leave no diagonals to sum along.
    distance = query.positions(table.device)[:, None] - key.positions(table.device)[None, :]
    return table.index_select(1, distance.clamp_(min=0).flatten()).unflatten(1, distance.shape)
