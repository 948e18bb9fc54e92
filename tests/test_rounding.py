"""Tolerances of numeric tests: large enough for rounding in any order, too small for other errors."""

import math

import pytest
import torch
from torch import Tensor

from megatron.utils.rounding import suspend_rounding
from tools.tolerances import (
    SAFETY_FACTOR,
    Results,
    RoundingMode,
    assert_close_in_rounding,
    assert_within_rounding,
    compute_error_ratio,
    estimate_rounding_sizes,
)

TERMS = 1000


def _terms(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(40, TERMS, generator=generator).to(dtype) for _ in "ab")


def _products(dtype: torch.dtype) -> Results:
    """Return row sums and products of all rows, exact for numbers rounded to the type."""
    a, b = (x.double() for x in _terms(dtype))
    return {"sum": a.sum(1), "products": a @ b.T}


def _in_order(dtype: torch.dtype, order: Tensor) -> Results:
    """Return the same results in the type, summed in the given order: the worst case for a library."""
    a, b = (x[:, order] for x in _terms(dtype))
    total, products = torch.zeros(40), torch.zeros(40, 40)
    for term in range(TERMS):
        total = total + a[:, term].float()
        products = products + a[:, term, None].float() * b[:, term].float()
    return {"sum": total, "products": products}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_sums_in_any_order_are_rounding(order: str, dtype: torch.dtype) -> None:
    orders = {"forwards": torch.arange(TERMS), "backwards": torch.arange(TERMS).flip(0)}
    orders["shuffled"] = torch.randperm(TERMS)
    assert_within_rounding(_in_order(dtype, orders[order]), lambda: _products(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_sums_in_a_half_type_are_not_rounding(dtype: torch.dtype) -> None:
    found = _in_order(dtype, torch.arange(TERMS))
    half = {name: x.to(dtype).float() for name, x in found.items()}
    with pytest.raises(AssertionError, match="times the rounding error of torch"):
        assert_within_rounding(half, lambda: _products(dtype), dtype)


@pytest.mark.parametrize("fault", [math.nan, math.inf, 1e-2])
def test_one_wrong_element_is_not_rounding(fault: float) -> None:
    found = {name: x.clone() for name, x in _products(torch.float32).items()}
    found["products"][3, 4] += fault
    assert compute_error_ratio(found, lambda: _products(torch.float32), torch.float32)["products"] > SAFETY_FACTOR


@pytest.mark.parametrize("scale", [0.1, 0.9, 1.2, 2.0, 3.5, 3.99, 4.01, 8.0])
def test_fewer_draws_come_to_the_same_judgement(scale: float) -> None:
    truth = _products(torch.float32)
    kinds = dict.fromkeys(truth, torch.float64)
    sizes = estimate_rounding_sizes(kinds, truth, lambda: _products(torch.float32), torch.float32)
    found = {name: exact.clone() for name, exact in truth.items()}
    found["products"][3, 4] += scale * sizes["products"].min()  # the smaller of norm and maximum: the maximum
    ratio = compute_error_ratio(found, lambda: _products(torch.float32), torch.float32)["products"]
    assert (ratio <= SAFETY_FACTOR) == (scale <= SAFETY_FACTOR)


def test_results_of_other_names_or_shapes_are_rejected() -> None:
    found = dict(_products(torch.float32))
    with pytest.raises(AssertionError, match="sum"):
        compute_error_ratio({"products": found["products"]}, lambda: found, torch.float32)
    with pytest.raises(AssertionError, match="products"):
        compute_error_ratio(found | {"products": found["products"].T[:3]}, lambda: found, torch.float32)


def test_exact_results_have_no_tolerance() -> None:
    zero = {"zero": torch.zeros(3, dtype=torch.float64)}
    assert compute_error_ratio(zero, lambda: zero, torch.float32) == {"zero": 0.0}
    assert compute_error_ratio({"zero": torch.tensor([0.0, 1e-30, 0.0])}, lambda: zero, torch.float32) == {
        "zero": math.inf
    }


def test_gradients_are_disturbed_as_well_and_the_same_every_time() -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).requires_grad_()

    def gradient() -> Tensor:
        return torch.autograd.grad(torch.softmax(x * 3, 0).log().sum(), x)[0]

    with RoundingMode(torch.float32, 1):
        first = gradient()
    with RoundingMode(torch.float32, 1):
        second = gradient()
    assert torch.equal(first, second)
    assert 0 < (first - gradient()).abs().max() < 1e-4


def test_suspended_operations_are_exact_and_their_gradients_disturbed() -> None:
    x = torch.linspace(0.1, 1, 9, dtype=torch.float64).requires_grad_()
    with RoundingMode(torch.float32, 1):
        with suspend_rounding():
            root = x.sqrt()
        disturbed, (gradient,) = x.sqrt(), torch.autograd.grad(root.sum(), x)
    assert torch.equal(root, x.sqrt())
    assert not torch.equal(disturbed, x.sqrt())
    assert not torch.equal(gradient, torch.autograd.grad(x.sqrt().sum(), x)[0])


COMMON_FUNCTIONS = {
    "mean": lambda x: x.mean(1),
    "mean of all": lambda x: x.square().mean(),
    "amax": lambda x: x.amax(1) * x.exp2().amin(1),
    "max": lambda x: x.max(1).values + x.min(1).values,
    "topk": lambda x: x.topk(3, 1).values.square(),
    "tril": lambda x: (x @ x.T).tril(),
    "norm": lambda x: x.norm(dim=1),
    "exp2": torch.exp2,
    "expm1": lambda x: torch.expm1(x) + torch.log2(x.abs()),
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "logsigmoid": lambda x: -torch.nn.functional.softplus(-x),
}


@pytest.mark.parametrize("name", COMMON_FUNCTIONS)
def test_common_functions_have_rules_that_find_faults(name: str) -> None:
    terms = 3 * torch.randn(40, 100, generator=torch.Generator().manual_seed(6))

    def compute(dtype: torch.dtype) -> Results:
        x = terms.to(dtype).requires_grad_()
        out = COMMON_FUNCTIONS[name](x)
        return {"out": out.detach(), "grad": torch.autograd.grad(out.square().sum(), x)[0]}

    found = compute(torch.float32)
    assert_within_rounding(found, lambda: compute(torch.float64), torch.float32)
    for result in found:
        faulty = found | {result: found[result] * (1 + 1e-4)}
        ratios = compute_error_ratio(faulty, lambda: compute(torch.float64), torch.float32)
        assert ratios[result] > SAFETY_FACTOR


def test_an_operation_without_a_rule_is_no_exact_one() -> None:
    message = r"^aten\.erf\.default has no rounding rule"
    with RoundingMode(torch.float32, 0), pytest.raises(NotImplementedError, match=message):
        torch.erf(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_sums_in_two_orders_match_and_a_missing_term_is_detected(dtype: torch.dtype) -> None:
    terms = torch.rand(40, TERMS, generator=torch.Generator().manual_seed(7), dtype=dtype) / TERMS
    forwards, backwards = (x.cumsum(1)[:, -1] for x in (terms, terms.flip(1)))
    assert_close_in_rounding(forwards, backwards, TERMS)
    with pytest.raises(AssertionError, match="1000 terms and 1 consecutive sums allow"):
        assert_close_in_rounding(forwards, terms[:, 1:].sum(1), TERMS)


@pytest.mark.parametrize(("first", "second"), [(math.inf, 1.0), (1.0, -math.inf), (math.nan, 1.0), (1.0, math.nan)])
def test_nonfinite_values_match_only_if_equal(first: float, second: float) -> None:
    minus = torch.tensor([-math.inf, 2.0])
    assert_close_in_rounding(minus, minus.clone(), 1)
    with pytest.raises(AssertionError):
        assert_close_in_rounding(torch.tensor([first]), torch.tensor([second]), 1)


def test_running_sums_and_gates_are_disturbed() -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)
    compute = lambda: {"gates": x.sigmoid(), "count": x.sigmoid().cumsum(0)}  # noqa: E731
    assert_within_rounding({name: value.float() for name, value in compute().items()}, compute, torch.float32)
    faulty = {"gates": x.float().sigmoid(), "count": x.sigmoid().float().cumsum(0) + 1e-5}
    assert compute_error_ratio(faulty, compute, torch.float32)["count"] > SAFETY_FACTOR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rounding_of_results_differs_from_rounding_of_factors(dtype: torch.dtype) -> None:
    a, b = _terms(dtype)

    def compute(a: Tensor, b: Tensor) -> Results:
        return {"found": (a * b + a).exp() / (1 + b * b)}

    found, exact = compute(a, b), lambda: compute(a.double(), b.double())
    assert_within_rounding(found, exact, dtype, rounds_every_op=True)
    wide = {"found": compute(a.float(), b.float())["found"]}
    assert compute_error_ratio(wide, exact, dtype)["found"] <= SAFETY_FACTOR
    assert compute_error_ratio({"found": found["found"].float()}, exact, dtype)["found"] > SAFETY_FACTOR


@pytest.mark.parametrize("subnormal", [False, True], ids=["normal", "subnormal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_factors_are_rounded_independently_in_every_draw(dtype: torch.dtype, subnormal: bool) -> None:
    info = torch.finfo(dtype)
    exact = torch.rand(10_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact, spacing = (
        (exact * info.smallest_normal, info.smallest_normal * info.eps) if subnormal else (1 + exact, info.eps)
    )
    errors = torch.stack([(RoundingMode(dtype, seed).round_factor(exact) - exact) / spacing for seed in range(2)])
    assert errors.abs().max() <= 0.5
    # Squares of uniform numbers have a relative deviation of √0.8, so the mean of 10,000 has one of 0.9%.
    torch.testing.assert_close(
        errors.square().mean(1), torch.full((2,), 1 / 12, dtype=torch.float64), rtol=0.04, atol=0
    )
    assert torch.corrcoef(errors)[0, 1].abs() < 0.04  # four deviations of 1 / √10,000
    nearest = exact.to(dtype).double()
    assert torch.equal(RoundingMode(dtype, 0).round_factor(nearest), nearest)
