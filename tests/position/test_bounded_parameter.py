"""Bounds are enforced, and gradients are unchanged."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.position import registry
from megatron.position.bounded_parameter import BoundedParameter, init_uniform
from megatron.position.facts import AttentionDims
from megatron.position.numerics import pow_with_finite_gradient

finite = st.floats(-5, 5, allow_nan=False, width=32)


@given(value=finite, grad=finite, low=st.sampled_from([-math.inf, 0.01]), high=st.sampled_from([2.0, math.inf]))
def test_a_value_is_used_within_its_bounds_and_its_gradient_passes(value, grad, low, high) -> None:
    parameter = BoundedParameter((1,), lambda t: t.fill_(value), low, high)
    with torch.no_grad():
        parameter.value.fill_(value)  # outside the bounds, as after a plain optimizer step
    used = parameter()
    assert low - 1e-9 <= used.item() <= high
    used.backward(torch.tensor([grad], dtype=torch.float32))
    assert parameter.value.grad.item() == torch.tensor(grad, dtype=torch.float32).item()


def test_fresh_values_start_inside() -> None:
    assert BoundedParameter((1000,), init_uniform(0, 2), low=0.5).value.min() >= 0.5


def test_reading_an_unbounded_parameter_gives_a_tensor_of_its_own() -> None:
    parameter = BoundedParameter((3,), init_uniform(0, 1))
    assert parameter().data_ptr() != parameter.value.data_ptr()


def test_power_has_the_limit_as_its_gradient_at_zero() -> None:
    n = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    r = torch.tensor([[0.01], [2.0]], dtype=torch.float64, requires_grad=True)
    pow_with_finite_gradient(n, r).sum().backward()
    exact = sum(x ** r.detach() * math.log(x) for x in (1.0, 3.0))
    torch.testing.assert_close(r.grad, exact)


STARTS = [
    (name, option)
    for name in registry.list_encodings()
    for option in registry.load_encoding_class(name).options()
    if option.endswith(("_below", "_start"))
]


@pytest.mark.parametrize(("name", "option"), STARTS)
def test_start_values_are_options(name: str, option: str) -> None:
    """`r1_below` is the upper limit of r1's initial values, `c_start` the initial value of c."""
    parameter, kind = option.rsplit("_", 1)
    encoding = registry.build_encoding(name, AttentionDims(200, 4, 800, 16, 16), {option: 0.3})
    values = getattr(encoding, parameter)()
    if kind == "start":
        assert torch.equal(values, torch.full_like(values, 0.3))
    else:
        assert values.min() >= 0.01
        assert values.max() <= 0.3
        assert abs(values.mean() - 0.15) < 0.03  # the mean of 200 values from U(0, 0.3) has standard deviation 0.006
    with pytest.raises(ValueError, match=f"option {option}.* is -1"):
        registry.build_encoding(name, AttentionDims(3, 4, 12, 16, 16), {option: -1.0})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("kerple_log", "r1_below", float("inf")),
        ("rotary", "base", float("nan")),
        ("fire", "c_start", float("inf")),
        ("cope", "positions", 10**11),
        ("t5", "std", -1.0),
        ("transformer_xl", "std", -0.5),
        ("learned", "std", -0.5),
    ],
)
def test_absurd_option_values_are_rejected(name: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"option {option}.* is {value}"):
        registry.build_encoding(name, AttentionDims(3, 4, 12, 16, 16), {option: value})
