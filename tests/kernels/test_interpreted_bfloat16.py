"""bfloat16 in the interpreter equals PyTorch's."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.interpreted_bfloat16 import from_bits, get_bits, round_to_bfloat16
from megatron.kernels.runtime import launch_context

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")

BITS = np.arange(1 << 16, dtype=np.uint32)
"""Bits of every bfloat16: subnormal numbers, infinities and NaN too."""
LOWER = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves of float32 numbers: a bfloat16, next to it, a tie, and next to the tie."""


def _draw(count: int, seed: int) -> Tensor:
    """Return numbers of all sizes that remain finite when multiplied, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-40, 40, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.1, 0, x)


@triton.jit
def _compare_kernel(x, y, larger, smaller, kept, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(larger + i, tl.maximum(a, b))
    tl.store(smaller + i, tl.minimum(a, b))
    tl.store(kept + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))


def test_the_larger_of_nan_and_a_number_is_the_number_as_on_a_gpu() -> None:
    nan = float("nan")
    x, y = torch.tensor([nan, 1.0, nan, -2.0]), torch.tensor([3.0, nan, nan, 5.0])
    larger, smaller, kept = (torch.empty(4) for _ in range(3))
    with launch_context(x):
        _compare_kernel[(1,)](x, y, larger, smaller, kept, 4)
    expected = torch.tensor([3.0, 1.0, nan, 5.0]), torch.tensor([3.0, 1.0, nan, -2.0])
    torch.testing.assert_close((larger, smaller), expected, equal_nan=True)
    assert kept.isnan().tolist() == [True, True, True, False]


def test_every_number_is_rounded_as_pytorch_rounds_it() -> None:
    numbers = np.concatenate([(BITS << 16) | lower for lower in LOWER]).astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(numbers).bfloat16()
    found = round_to_bfloat16(numbers)
    is_nan = np.isnan(numbers)
    assert (np.isnan(found) == is_nan).all()
    assert np.isnan(from_bits(get_bits(numbers)))[is_nan].all()
    assert (found.view(np.uint32) == expected.float().numpy().view(np.uint32))[~is_nan].all()
    assert (get_bits(found) == expected.view(torch.int16).numpy().view(np.uint16))[~is_nan].all()
    assert (from_bits(get_bits(found)).view(np.uint32) == found.view(np.uint32))[~is_nan].all()


@triton.jit
def _compute_each(x_ptr, y_ptr, wide_ptr, integer_ptr, half_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    results = (
        x + y,
        x - y,
        x * y,
        x / y,
        -x,
        tl.abs(x),
        tl.maximum(x, y),
        tl.where(x > y, x, y),
        x * y + x,
        x * 3.0,
        x + 0.1,
        tl.load(wide_ptr + i).to(tl.bfloat16),
        tl.load(integer_ptr + i).to(tl.bfloat16),
        tl.load(half_ptr + i).to(tl.bfloat16),
        tl.load(x_ptr + i, mask=i % 3 > 0, other=0.3),
        tl.full((SIZE,), 0.3, tl.bfloat16),
        (x > y).to(tl.bfloat16),
        x.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True),
    )
    for row in tl.static_range(len(results)):
        tl.store(out_ptr + row * SIZE + i, results[row])


def _expect_each(x: Tensor, y: Tensor, wide: Tensor, integers: Tensor, half: Tensor) -> list[Tensor]:
    is_loaded = torch.arange(len(x)) % 3 > 0
    filled = torch.full_like(x, 0.3)
    return [
        *(x + y, x - y, x * y, x / y, -x, x.abs(), torch.maximum(x, y), torch.where(x > y, x, y), x * y + x, x * 3),
        *(x + filled.new_tensor(0.1), wide.bfloat16(), integers.bfloat16(), half.bfloat16()),
        *(torch.where(is_loaded, x, filled), filled, (x > y).bfloat16(), x),
    ]


def test_operations_and_conversions_equal_those_of_pytorch() -> None:
    size = 1024
    x, y = (_draw(size, seed).bfloat16() for seed in range(2))
    y = torch.where(y == 0, 1, y)
    given = x, y, _draw(size, 2), torch.randint(-(1 << 20), 1 << 20, (size,)), _draw(size, 3).clamp(-1e4, 1e4).half()
    expected = torch.stack(_expect_each(*given))
    found = torch.zeros_like(expected)
    with launch_context(x):
        _compute_each[(1,)](*given, found, size)
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), row  # Triton negates by 0 - x


@triton.jit
def _narrow(x_ptr, integer_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x.to(tl.float16))
    tl.store(out_ptr + SIZE + i, x.to(tl.bfloat16).to(tl.float16))
    tl.store(out_ptr + 2 * SIZE + i, tl.load(integer_ptr + i).to(tl.float16))
    tl.store(out_ptr + 3 * SIZE + i, x)  # a store converts as well


def test_numbers_beyond_float16_become_infinite_without_a_warning() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e6, 3e38, -float("inf"), 1.0, 0.0])
    integers = x.nan_to_num(0, 0, 0).clamp(-(1 << 20), 1 << 20).int()
    found = torch.zeros(4, len(x), dtype=torch.float16)
    with launch_context(x), warnings.catch_warnings():
        warnings.simplefilter("error")
        _narrow[(1,)](x, integers, found, len(x))
    assert torch.equal(found, torch.stack([x.half(), x.bfloat16().half(), integers.half(), x.half()]))


@triton.jit
def _reduce(x_ptr, y_ptr, products_ptr, sums_ptr, largest_ptr, rounded_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    square = i[:, None] * SIZE + i[None, :]
    x, y = tl.load(x_ptr + square), tl.load(y_ptr + square)
    tl.store(products_ptr + square, tl.dot(x, y))
    tl.store(sums_ptr + i, tl.sum(x.to(tl.float32), 1))
    tl.store(largest_ptr + i, tl.max(x, 1))
    tl.store(rounded_ptr + square, tl.dot(x, tl.trans(x.to(tl.float32)).to(tl.bfloat16)).to(tl.bfloat16))


def test_products_and_sums_add_in_float32() -> None:
    """Sums of small integers are exact in float32, but most are no bfloat16."""
    size = 32
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-99, 99, (size, size), generator=generator).bfloat16() for _ in "xy")
    products, sums, largest, rounded = torch.zeros(size, size), torch.zeros(size), torch.zeros(size), x.clone()
    with launch_context(x):
        _reduce[(1,)](x, y, products, sums, largest, rounded, size)
    assert torch.equal(products, x.float() @ y.float())
    assert not torch.equal(products, products.bfloat16().float())
    assert torch.equal(sums, x.float().sum(1))
    assert torch.equal(largest, x.float().amax(1))
    assert torch.equal(rounded, (x.float() @ x.float().T).bfloat16())


@triton.jit
def _add_atomically(x_ptr):
    tl.atomic_add(x_ptr, tl.load(x_ptr))


@triton.jit
def _truncate(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).to(tl.float32).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def _sum_in_bfloat16(x_ptr):
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 2)), 0))


@pytest.mark.parametrize("kernel", [_add_atomically, _truncate, _sum_in_bfloat16], ids=["atomic", "truncation", "sum"])
def test_what_would_be_wrong_is_an_error(kernel: Callable[..., None]) -> None:
    with launch_context(x := torch.ones(2, dtype=torch.bfloat16)), pytest.raises(Exception, match="bfloat16"):
        kernel[(1,)](x)
