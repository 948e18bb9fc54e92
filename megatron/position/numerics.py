"""Tensor functions shared by several encodings: arithmetic in sufficient precision, and Toeplitz matrices from tables.

A table over distances n = i − j is expanded into a matrix over rows and columns.

A CUDA graph stores the address of every tensor that existed before its capture. A cache may evict such a tensor, after
which the graph would read memory that has been reused. Caches therefore pass the tensors that they return to
`retain_for_capture`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.position.token_range import TokenRange


def is_sharded_by_zero3(parameter: Tensor) -> bool:
    """Return True if DeepSpeed's ZeRO-3 shards a parameter and gathers it only around calls of its module."""
    return hasattr(parameter, "ds_id")


def has_parameters_sharded_by_zero3(module: nn.Module) -> bool:
    """Return True if ZeRO-3 shards any parameter of a module.

    Parameters are not read as attributes, because in a forward pass DeepSpeed would gather them from all ranks, and not
    all ranks may call this.
    """
    return any(is_sharded_by_zero3(parameter) for parameter in module.parameters())


def promote_to_float32(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if its type is wider (float64 in tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pow_with_finite_gradient(n: Tensor, exponent: Tensor) -> Tensor:
    """Return n^exponent for distances n ≥ 0 and exponents > 0, broadcast against each other.

    At n = 0 autograd would compute the derivative n^r·ln(n) as 0·(−∞) = NaN. This function returns the limit, 0.
    """
    positive = n > 0
    return torch.where(positive, torch.pow(torch.where(positive, n, 1.0), exponent), 0.0)


def compute_rotary_frequencies(half: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """Return base^(−m/half) for m = 0 … half − 1: float64 [half]."""
    return base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)


def compute_position_angles(positions: Tensor, half: int, base: float) -> Tensor:
    """Return positions [T] times the frequencies base^(−m/half), m = 0 … half − 1: float64 [T, half].

    The result is float64, because at position 65,536 a float32 angle is already off by 0.004 rad.
    """
    return positions.double()[:, None] * compute_rotary_frequencies(half, base, positions.device)


def compute_sinusoidal_embeddings(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return [sin; cos] of the angles of positions [T]: [T, dim]."""
    angle = compute_position_angles(positions, dim // 2, base)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x·cos + swap(x)·sin, where swap exchanges the halves of the first r dimensions; the others are unchanged.

    Args:
        x: [..., T, d].
        cos, sin: [T, r], or [H, T, r] per head. Both halves of a pair have the same cosine, and sines of opposite
            signs.
    """
    result: Tensor = _Rotation.apply(x, cos, sin)
    return result


class _Rotation(torch.autograd.Function):
    """x·cos + swap(x)·sin, where swap exchanges the halves of the rotated dimensions; the others are unchanged.

    The backward pass is written by hand. Autograd would split and concatenate the halves in each direction, and pad the
    splits with zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute in the type of cos and sin."""
        ctx.save_for_backward(cos, sin)
        result, turned, swapped = _allocate_rotated(x, cos.shape[-1])
        torch.addcmul(x[..., : cos.shape[-1]] * cos, swapped, sin, out=turned)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate back: swap(sin) is −sin."""
        cos, sin = ctx.saved_tensors
        result, turned, swapped = _allocate_rotated(grad, cos.shape[-1])
        # addcmul may round once, but each of the two terms must be rounded.
        torch.sub(grad[..., : cos.shape[-1]] * cos, swapped * sin, out=turned)
        return result, None, None


def _allocate_rotated(x: Tensor, rotated: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result with the unrotated dimensions, and views for the rotation.

    The views are the rotated dimensions of the result, and x with swapped halves.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = result
    if rotated < x.shape[-1]:
        result[..., rotated:] = x[..., rotated:]
        turned = result[..., :rotated]
    return result, turned, x[..., :rotated].roll(rotated // 2, -1)


def _sum_diagonals(x: Tensor) -> Tensor:
    """Return the sums of x [H, R, C] over equal j − i: [H, R + C − 1], ending with the first column of the last row."""
    heads, rows, columns = x.shape
    if 0 < columns < rows:  # shear along the shorter side: the sheared tensor has min(R, C) · (R + C) entries
        return _sum_diagonals(x.mT).flip(-1)
    # Read rows of `width` entries as rows of width + 1: row r moves left by r, and its first r entries move to the
    # zeros at the end of the previous row. Entries with equal j − i are then in one column (negative ones count from
    # the end).
    width = rows + columns
    sheared = x.new_zeros(heads, rows * (width + 1))
    sheared[:, : rows * width].view(heads, rows, width)[..., :columns] = x
    shifted = sheared.view(heads, rows, width + 1).sum(1)
    return torch.cat([shifted[:, width + 2 - rows :], shifted[:, :columns]], dim=1).flip(-1)


class _Toeplitz(torch.autograd.Function):
    """Expand a table [H, N] to a matrix [H, R, C] with matrix[h, r, c] = table[h, i − j].

    Entries with j > i are the first entry of the table. The first columns are those of the edge [H, R, e], if there is
    one.

    The backward pass sums along diagonals by shearing the gradient. This is a plain reduction without scatter, so it is
    fast on CPUs and deterministic on GPUs.
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, edge: Tensor | None, query: TokenRange, key: TokenRange, channels_last: bool
    ) -> Tensor:
        ctx.query, ctx.key, ctx.size = query, key, table.shape[-1]
        ctx.edge = 0 if edge is None else edge.shape[-1]
        # Row r reads a line of distances from entry rows − 1 − r on: gather the line, then copy its windows, last
        # first. Selected windows are stored row by row; flipped ones would be stored column by column, and readers of
        # the matrix would take several times as long.
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
    """Return cap·tanh(x/cap) (Gemma 2, arXiv:2408.00118), or x if there is no cap.

    The result is close to x for small x, and its magnitude never exceeds the cap.
    """
    return x if cap is None else torch.tanh(x / cap) * cap


def toeplitz(
    table: Tensor, query: TokenRange, key: TokenRange, *, edge: Tensor | None = None, channels_last: bool = False
) -> Tensor:
    """Expand a table over n = i − j into a matrix [H, R, C]. Entries with j > i are the table's value at n = 0.

    Args:
        table: [H, N] with N > the largest distance.
        edge: [H, R, e] replaces the first e columns.
        channels_last: H is innermost in memory.

    Raises:
        ValueError: an edge or channels last with sampled positions.
    """
    if query.sampled is None:
        return _Toeplitz.apply(table, edge, query, key, channels_last)
    if edge is not None or channels_last:
        raise ValueError("sampled positions support neither an edge nor channels last")
    # Sampled positions have no diagonals to sum along.
    distance = query.positions(table.device)[:, None] - key.positions(table.device)[None, :]
    return table.index_select(1, distance.clamp_(min=0).flatten()).unflatten(1, distance.shape)


_captures: list[list[Tensor]] = []


@contextmanager
def collect_captured_tensors() -> Iterator[list[Tensor]]:
    """Collect the cached tensors that are used inside the context. The owner of a captured graph must keep the list."""
    tensors: list[Tensor] = []
    _captures.append(tensors)
    try:
        yield tensors
    finally:
        _captures.pop()


def retain_for_capture(*tensors: Tensor) -> None:
    """Add tensors of a cache that can evict them to the capture in progress, if there is one."""
    if _captures:
        _captures[-1] += tensors
