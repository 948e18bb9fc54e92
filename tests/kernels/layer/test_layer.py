"""The layer's kernels in Triton's interpreter (or on a GPU) against PyTorch's operations in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.layer.activation import ACTIVATIONS, activate
from kernels.layer.heads import split_heads
from kernels.layer.loss import cross_entropy
from kernels.layer.norm import add, add_norm
from megatron.position.numerics import rotate_halves, soft_cap
from tools.rounding import Results

pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")

Inputs = dict[str, Tensor | None]


def _draw(device: str, dtype: torch.dtype, **shapes: tuple[int, ...] | None) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    return {
        name: None if shape is None else torch.randn(shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }


def _differentiate(compute: Callable[..., tuple[Tensor, ...]], inputs: Inputs, dtype: torch.dtype) -> Results:
    """Outputs, and the gradients of all inputs, in a type."""
    leaves = {name: None if x is None else x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    outputs = compute(**leaves)
    generator = torch.Generator().manual_seed(4)
    upstream = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    wanted = {name: x for name, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(outputs, list(wanted.values()), upstream)
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return found | {f"d{name}": x for name, x in zip(wanted, grads, strict=True)}


def _assert_alike(
    ours: Callable[..., tuple[Tensor, ...]], reference: Callable[..., tuple[Tensor, ...]], inputs: Inputs
) -> None:
    dtype = next(x.dtype for x in inputs.values() if x is not None)
    found = _differentiate(ours, inputs, dtype)
    expected = _differentiate(reference, inputs, torch.float64)
    unit = torch.finfo(dtype).eps
    for name, value in expected.items():
        assert found[name].shape == value.shape
        error = (found[name].double() - value).abs().max().item()
        size = max(value.abs().max().item(), 1.0)
        assert error <= 8 * unit * size, f"{name}: {error / (unit * size):.3g} units"


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "layernorm without shift", "rmsnorm"])
def test_add_norm(kind: str, joins: bool, scale: float, dtype: torch.dtype, device: str) -> None:
    width = 19
    inputs = _draw(
        device, dtype, branch=(3, 5, width), bias=(width,) if joins else None,
        residual=(3, 5, width) if joins else None, weight=(width,), shift=(width,) if kind == "layernorm" else None,
    )  # fmt: skip

    def ours(branch, bias, residual, weight, shift):  # type: ignore[no-untyped-def]
        centers = kind != "rmsnorm"
        return add_norm(branch, bias, residual, weight, shift, epsilon=1e-5, centers=centers, scale=scale)

    def reference(branch, bias, residual, weight, shift):  # type: ignore[no-untyped-def]
        total = (branch if bias is None else branch + bias) * scale + (0 if residual is None else residual)
        if kind == "rmsnorm":
            return total, F.rms_norm(total, (width,), weight, 1e-5)
        return total, F.layer_norm(total, (width,), weight, shift, 1e-5)

    _assert_alike(ours, reference, inputs)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_add(has_bias: bool, scale: float, dtype: torch.dtype, device: str) -> None:
    inputs = _draw(device, dtype, branch=(3, 5, 19), bias=(19,) if has_bias else None, residual=(3, 5, 19))

    def reference(branch, bias, residual):  # type: ignore[no-untyped-def]
        return (residual + scale * (branch if bias is None else branch + bias),)

    _assert_alike(lambda **x: (add(**x, scale=scale),), reference, inputs)


def test_norm_whose_sum_nobody_reads(device: str) -> None:
    inputs = _draw(device, torch.float32, branch=(5, 19), weight=(19,))

    def ours(branch, weight):  # type: ignore[no-untyped-def]
        return add_norm(branch, None, None, weight, None, epsilon=1e-5, centers=False)[1:]

    _assert_alike(ours, lambda branch, weight: (F.rms_norm(branch, (19,), weight, 1e-5),), inputs)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(activation: str, gated: bool, has_bias: bool, dtype: torch.dtype, device: str) -> None:
    width = 21 * (1 + gated)
    inputs = _draw(device, dtype, x=(3, 5, width), bias=(width,) if has_bias else None)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    }  # fmt: skip

    def reference(x, bias):  # type: ignore[no-untyped-def]
        x = x if bias is None else x + bias
        if not gated:
            return (functions[activation](x),)
        gate, up = x.chunk(2, -1)
        return (functions[activation](gate) * up,)

    _assert_alike(lambda x, bias: (activate(x, bias, activation, gated=gated),), reference, inputs)


@pytest.mark.parametrize("rotated", [0, 4, 6])
@pytest.mark.parametrize(("queries", "groups"), [(1, 3), (2, 2)])
def test_split_heads(queries: int, groups: int, rotated: int, dtype: torch.dtype, device: str) -> None:
    length, batch, dim = 5, 2, 6
    width = groups * (queries + 2) * dim
    inputs = _draw(device, dtype, mixed=(length, batch, width), bias=(width,))
    angle = torch.randn(length, max(rotated // 2, 1)).double().to(device)
    cos = torch.cat([angle.cos()] * 2, -1)
    sin = torch.cat([-angle.sin(), angle.sin()], -1)

    def ours(mixed, bias):  # type: ignore[no-untyped-def]
        rotation = (cos.float(), sin.float()) if rotated else None
        return split_heads(mixed + bias.detach(), bias, queries, groups, rotation)

    def reference(mixed, bias):  # type: ignore[no-untyped-def]
        parts = (mixed + bias).unflatten(-1, (groups, -1)).split([queries * dim, dim, dim], dim=3)
        q, k, v = (x.reshape(length, batch, -1, dim) for x in parts)
        if rotated:
            q, k = (rotate_halves(x.permute(1, 2, 0, 3), cos, sin).permute(2, 0, 1, 3) for x in (q, k))
        return q, k, v

    _assert_alike(ours, reference, inputs)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("reads_log_z", [True, False])
def test_cross_entropy(reads_log_z: bool, cap: float | None, dtype: torch.dtype, device: str) -> None:
    inputs = _draw(device, dtype, logits=(4, 3, 70))
    labels = torch.randint(70, (3, 4), generator=torch.Generator().manual_seed(5)).to(device)

    def ours(logits):  # type: ignore[no-untyped-def]
        return cross_entropy(logits * 1.0, labels, cap)[: 1 + reads_log_z]

    def reference(logits):  # type: ignore[no-untyped-def]
        logits = soft_cap(logits, cap).transpose(0, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 4)
        return (losses, torch.logsumexp(logits, -1))[: 1 + reads_log_z]

    _assert_alike(ours, reference, inputs)


def test_a_second_backward_pass_is_an_error(device: str) -> None:
    logits = torch.randn(2, 1, 33, device=device, requires_grad=True)
    losses, _ = cross_entropy(logits * 1.0, torch.zeros(1, 2, dtype=torch.long, device=device))
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()
