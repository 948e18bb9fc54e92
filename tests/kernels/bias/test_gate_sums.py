"""Running sums of gates in Triton's interpreter (or on a GPU), compared with the reference."""

import pytest
import torch

from megatron.attention import reference
from megatron.kernels.bias.gate_sums import sum_gates


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (40, 40), (37, 5), (1030, 1030), (2100, 3)])
def test_sums_equal_the_reference_bit_for_bit(num_tokens: int, num_rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    drawn = -torch.rand(num_tokens, 2, 3, generator=generator) * 12
    gates = drawn.to(device).permute(1, 2, 0).requires_grad_()  # as a view of activations
    found, expected = sum_gates(gates, num_rows), reference.sum_gates(gates, num_rows)
    into = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device) for x in found]
    into[1] = into[1].mT.contiguous().mT
    own = torch.autograd.grad(found, gates, into)[0]
    true = torch.autograd.grad(expected, gates, into)[0]
    assert own.stride() == gates.stride()
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == torch.float64
        assert torch.equal(mine, other)
    torch.testing.assert_close(own, true, rtol=1e-6, atol=1e-7)


def test_other_types_are_rejected() -> None:
    with pytest.raises(ValueError, match="float64"):
        sum_gates(torch.zeros(1, 1, 8, dtype=torch.float64), 8)
