"""Tables of the bias half of Conv1, compared with the convolution of the whole bias map, including gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from megatron.kernels.cdape_attention.bias_term import compute_bias_contributions


@given(
    heads=st.integers(1, 4),
    width=st.integers(1, 5),
    reach=st.integers(0, 3),
    rows=st.integers(1, 9),
    offset=st.integers(0, 12),
    window=st.none() | st.integers(1, 9),
)
def test_spread_over_rows_and_columns_they_are_the_convolution(
    heads: int, width: int, reach: int, rows: int, offset: int, window: int | None
) -> None:
    size, columns = 2 * reach + 1, offset + rows
    generator = torch.Generator().manual_seed(heads + 10 * width + 100 * rows + offset)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    bias, w1, b1 = leaf(heads, columns + 1), leaf(width, 2 * heads, 1, size), leaf(width)
    i, j = offset + torch.arange(rows)[:, None], torch.arange(columns + reach)[None, :]
    n = i - j
    visible = (n >= 0) if window is None else (n >= 0) & (n < window)
    seen = bias[:, n.clamp(min=0)].masked_fill(~visible, 0)
    expected = F.conv2d(F.pad(seen, (reach, reach)), w1[:, heads:], b1)

    flat = compute_bias_contributions(bias, w1, b1, rows, offset, window, torch.float64)
    edge = reach + columns + torch.arange(rows)[:, None] * reach + j
    alive = n >= -reach  # no visible column depends on entries further right
    entry = torch.where(j < reach, edge, n + reach).where(alive, 0)
    found = flat[entry].permute(2, 0, 1)
    torch.testing.assert_close(found * alive, expected * alive, atol=1e-12, rtol=1e-12)

    into = torch.randn(expected.shape, generator=generator, dtype=torch.float64) * alive
    ours = torch.autograd.grad(found, (bias, w1, b1), into)
    for mine, true in zip(ours, torch.autograd.grad(expected, (bias, w1, b1), into), strict=True):
        torch.testing.assert_close(mine, true, atol=1e-11, rtol=1e-11)


def test_without_a_bias_every_entry_is_the_constant() -> None:
    flat = compute_bias_contributions(
        None, torch.ones(3, 2, 1, 5), torch.tensor([1.0, 2.0, 3.0]), 4, 6, None, torch.float32
    )
    assert flat.shape == (2 + 10 + 4 * 2, 3)
    assert (flat == torch.tensor([1.0, 2.0, 3.0])).all()


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 1e9)])
def test_a_bias_beyond_the_type_saturates(dtype: torch.dtype, largest: float) -> None:
    flat = compute_bias_contributions(
        torch.full((1, 8), -1e9), torch.ones(1, 2, 1, 1), torch.zeros(1), 8, 0, None, dtype
    )
    assert (flat == -largest).all()
