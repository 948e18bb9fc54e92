"""AdamW with bounds: AdamW inside them, clamped where AdamW would leave, and able to return."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.options.optimizer import OptimizerChoice, OptimizerOptions, OptimizerParams
from megatron.position.bounded_parameter import BoundedParameter, init_constant, init_uniform
from megatron.training.optimizer import build_optimizer
from megatron.training.projected_optimizers import ProjectedAdamW
from tools.tolerances import compute_tolerance

OPTIONS = OptimizerOptions(optimizer=OptimizerChoice(params=OptimizerParams(lr=0.05, betas=[0.8, 0.9])))


def by_hand(value: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Compute AdamW by its paper in float64."""
    value = value.double()
    m, v = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(gradients, start=1):
        gradient = gradient.double()
        m = 0.8 * m + 0.2 * gradient
        v = 0.9 * v + 0.1 * gradient**2
        value = value - lr * decay * value
        value = value - lr * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
    return value


def step(optimizer: ProjectedAdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def test_it_is_adamw_without_bounds_and_projected_with_bounds() -> None:
    free, bounded = nn.Parameter(torch.randn(7)), nn.Parameter(torch.rand(5))
    starts = free.detach().clone(), bounded.detach().clone()
    optimizer = build_optimizer(
        [
            {"params": [free], "weight_decay": 0.3},
            {"params": [bounded], "weight_decay": 0.0, "low": 0.0, "high": math.inf},
        ],
        OPTIONS,
    )
    gradients = [(torch.randn(7), torch.linspace(-1, 1, 5)) for _ in range(4)]
    for first, second in gradients:
        free.grad, bounded.grad = first.clone(), second.clone()
        step(optimizer, 0.05)
    rounding = compute_tolerance(1, 4 * 8) * 3  # four steps of about eight operations on numbers of up to three
    torch.testing.assert_close(
        free.double(), by_hand(starts[0], [g for g, _ in gradients], 0.05, 0.3), rtol=0, atol=rounding
    )
    unbounded = by_hand(starts[1], [g for _, g in gradients], 0.05, 0.0)
    inside = unbounded > 0.3  # never near the bound during training
    torch.testing.assert_close(bounded.double()[inside], unbounded[inside], rtol=0, atol=rounding)
    for _ in range(40):
        bounded.grad = torch.ones(5)
        step(optimizer, 0.05)
    assert torch.equal(bounded.detach(), torch.zeros(5))


def test_no_step_happens_before_the_schedule_sets_a_rate() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([{"params": [weight], "weight_decay": 0.5}], OPTIONS)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3))
    optimizer.reset_steps()
    assert [float(state["step"]) for state in optimizer.state.values()] == [0.0]


@pytest.mark.parametrize(("low", "high", "outward"), [(0.01, math.inf, 1.0), (0.0, 2.0, -1.0)])
def test_a_parameter_at_its_bound_can_leave_it(low: float, high: float, outward: float) -> None:
    module = BoundedParameter((4,), init_uniform(0.5, 1.5), low, high)
    optimizer = build_optimizer([{"params": [module.value], "weight_decay": 0.0, "low": low, "high": high}], OPTIONS)
    bound = low if outward > 0 else high

    def push(direction: float) -> None:
        optimizer.zero_grad()
        (direction * module()).sum().backward()
        step(optimizer, 0.05)

    for _ in range(60):
        push(outward)
    assert torch.equal(module.value.detach(), torch.full((4,), bound))
    for _ in range(5):  # if gradients had accumulated at the bound, momentum would keep it there
        push(-outward)
    assert bool((module.value != bound).all())
    assert bool(((module.value >= low) & (module.value <= high)).all())


@given(st.floats(-0.25, 0.25, width=32), st.sampled_from([0.01, 0.5, 2.0]), st.booleans())
def test_only_gradients_against_a_bound_are_dropped(gradient: float, value: float, bounded: bool) -> None:
    parameter = nn.Parameter(torch.tensor([value]))
    low, high = (0.01, 2.0) if bounded else (-math.inf, math.inf)
    optimizer = ProjectedAdamW([{"params": [parameter], "low": low, "high": high}], lr=0.1, weight_decay=0.0)
    parameter.grad = torch.tensor([gradient])
    optimizer.mask_outward_gradients()
    outward = bounded and ((value == 0.01 and gradient > 0) or (value == 2.0 and gradient < 0))
    assert parameter.grad.item() == (0.0 if outward else torch.tensor(gradient).item())


def test_contributions_to_a_gradient_are_not_judged_separately() -> None:
    """Contributions to a gradient are not judged separately: with one use pushing out and one pulling back harder, it
    returns.
    """
    module = BoundedParameter((1,), init_constant(0.01), low=0.01)
    optimizer = ProjectedAdamW([{"params": [module.value], "low": 0.01, "high": math.inf}], lr=0.1, weight_decay=0.0)
    (0.4 * module() - 0.5 * module()).sum().backward()
    torch.testing.assert_close(module.value.grad, torch.tensor([-0.1]))
    optimizer.step()
    assert module.value.item() > 0.1
