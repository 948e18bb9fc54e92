"""Bias matrices in Triton's interpreter (or on a GPU) against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.bias import configs, reference
from kernels.bias.cases import SMALL, Case
from kernels.bias.op import fire_bias, toeplitz_bias

TYPES = [torch.float32, torch.float16]
EPS = torch.finfo(torch.float32).eps
FIRE = ("c", "multiplier", "weight1", "bias1", "weight2", "bias2")


def _upstream(case: Case, device: str) -> Tensor:
    return torch.randn(case.H, case.R, case.C, generator=torch.Generator().manual_seed(1)).to(device)


def _leaves(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "fp16"])
@pytest.mark.parametrize("above", [0.0, float("-inf")])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_toeplitz_equals_indexing(case: Case, above: float, dtype: torch.dtype, device: str) -> None:
    table = case.table(device)
    found = toeplitz_bias(table, case.R, case.C, offset=case.offset, dtype=dtype, above=above)
    assert torch.equal(
        found, reference.toeplitz_bias(table, case.R, case.C, offset=case.offset, dtype=dtype, above=above)
    )


def _table_gradients(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ours, plain PyTorch's in float32, and the exact one."""
    grad = _upstream(case, device).to(dtype)
    gradients = []
    for compute in (None, torch.float32, torch.float64):
        table = case.table(device).to(compute or torch.float32).requires_grad_()
        make = toeplitz_bias if compute is None else reference.toeplitz_bias
        out = make(table, case.R, case.C, offset=case.offset, dtype=dtype if compute is None else compute)
        out.backward(grad.to(out.dtype))
        assert table.grad is not None
        gradients.append(table.grad)
    return gradients[0], gradients[1], gradients[2]


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("rows_per_part", [None, 7], ids=["whole", "parts"])
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_table_gradient_is_the_sum_of_each_diagonal(
    case: Case, rows_per_part: int | None, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows_per_part is not None:
        monkeypatch.setattr(configs, "parts", lambda programs, rows: (-(-rows // rows_per_part), rows_per_part))
    ours, plain, truth = _table_gradients(case, dtype, device)
    size = torch.linalg.vector_norm
    assert size(ours - truth) <= 2 * size(plain - truth) + EPS * size(truth)


@given(rows=st.integers(1, 45), columns=st.integers(1, 45), offset=st.integers(0, 40))
@settings(max_examples=15)
def test_gradient_of_ones_counts_the_diagonals(rows: int, columns: int, offset: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.zeros(1, offset + rows, device=device, requires_grad=True)
    toeplitz_bias(table, rows, columns, offset=offset).sum().backward()
    distances = [offset + r - c for r in range(rows) for c in range(columns)]
    counts = [distances.count(n) for n in range(offset + rows)]
    assert table.grad is not None
    assert table.grad[0].tolist() == counts


def test_float16_saturates_instead_of_overflowing(device: str) -> None:
    table = torch.tensor([[0.0, -1e6, float("-inf")]], device=device)
    matrix = toeplitz_bias(table, 3, 3, dtype=torch.float16)
    assert matrix[0, 2].tolist() == [float("-inf"), -65504.0, 0.0]


def _fire(case: Case, device: str, compute: torch.dtype | None, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = _leaves(case.fire(device), compute or torch.float32)
    make = fire_bias if compute is None else reference.fire_bias
    out = make(
        *leaves,
        case.R,
        case.C,
        half_length=case.half_length,
        offset=case.offset,
        dtype=dtype if compute is None else compute,
    )
    grad = _upstream(case, device).to(dtype).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, grad)
    return {"bias": out.detach(), **dict(zip(FIRE, gradients, strict=True))}


def _summed(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the gradients of c and of the multiplier are sums of: terms of both signs, through u(n) and through z(i)."""
    c, multiplier, weight1, bias1, weight2, _ = (x.double() for x in case.fire(device))
    i = (case.offset + torch.arange(case.R, device=device)).double()
    n = i[:, None] - torch.arange(case.C, device=device)
    length = torch.maximum(multiplier * case.half_length, i)
    z = torch.log1p(c * length) + 1e-6
    x = (torch.log1p(c * n.clamp(min=0)) / z[:, None]).requires_grad_()
    hidden = torch.relu(x[..., None] * weight1[:, 0] + bias1)
    grad = _upstream(case, device).to(dtype).double() * (n >= 0)
    (dx,) = torch.autograd.grad(torch.einsum("rcw,hw->hrc", hidden, weight2), x, grad)
    through_u = dx / z[:, None] * n.clamp(min=0) / (1 + c * n.clamp(min=0))
    through_z = dx * x.detach() / z[:, None]
    to_c = through_z * (length / (1 + c * length))[:, None]
    to_multiplier = through_z * (c * case.half_length / (1 + c * length) * (length > i))[:, None]
    return {"c": torch.cat([through_u, -to_c]), "multiplier": -to_multiplier}


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_fire_and_all_its_gradients(case: Case, dtype: torch.dtype, device: str) -> None:
    """The error is at most twice plain PyTorch's in float32, and one rounding of the type.

    A single number can be lucky in PyTorch, so c and the multiplier have a rounding of their summed terms' sizes.
    """
    ours = _fire(case, device, None, dtype)
    plain, truth = (_fire(case, device, compute, dtype) for compute in (torch.float32, torch.float64))
    size = torch.linalg.vector_norm
    sizes = {name: size(exact) for name, exact in truth.items()}
    for name, terms in _summed(case, device, dtype).items():
        torch.testing.assert_close(terms.sum(), truth[name].sum())
        sizes[name] = terms.abs().sum()
    for name, exact in truth.items():
        allowed = 2 * size(plain[name].double() - exact) + torch.finfo(ours[name].dtype).eps * sizes[name]
        assert size(ours[name].double() - exact) <= allowed, name


def test_the_multiplier_has_no_gradient_where_all_rows_are_beyond_it(device: str) -> None:
    leaves = _leaves(Case(2, 5, 30, offset=25).fire(device))
    fire_bias(*leaves, 5, 30, half_length=2.0, offset=25).sum().backward()
    assert leaves[1].grad is not None
    assert leaves[0].grad is not None
    assert leaves[1].grad.item() == 0
    assert leaves[0].grad.item() != 0


@pytest.mark.parametrize("first", [1, 4, 9])
def test_fire_without_its_first_columns_is_the_rest_of_the_whole(first: int, device: str) -> None:
    parameters = Case(3, 5, 12, offset=7).fire(device)
    whole = fire_bias(*parameters, 3, 12, half_length=4.0, offset=9)
    part = fire_bias(*parameters, 3, 12 - first, half_length=4.0, offset=9 - first, first_column=first)
    assert torch.equal(part, whole[..., first:])


def test_fire_above_the_diagonal(device: str) -> None:
    case = SMALL[0]
    out = fire_bias(*case.fire(device), case.R, case.C, half_length=case.half_length, above=float("-inf"))
    above = torch.ones(case.R, case.C, dtype=torch.bool, device=device).triu(1)
    assert (out[:, above] == float("-inf")).all()
    assert out[:, ~above].isfinite().all()


def test_bitwise_repeatable(device: str) -> None:
    first, second = (_fire(SMALL[1], device, None, torch.float32) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert torch.equal(*(_table_gradients(SMALL[1], torch.float16, device)[0] for _ in range(2)))


def test_opcheck(device: str) -> None:
    table = Case(2, 9, 12, offset=3).table(device).requires_grad_()
    torch.library.opcheck(torch.ops.farfield.toeplitz_bias, (table, 9, 12, 3, torch.float16, 0.0))
    _, _, w1, b1, w2, b2 = _leaves(Case(2, 9, 12, W=5).fire(device))
    u, z = (torch.rand(n, device=device, requires_grad=True) for n in (12, 9))
    arguments = (u, (z.detach() + 1).requires_grad_(), w1.squeeze(1), b1, w2, b2, 12, 3, torch.float32, 0.0)
    torch.library.opcheck(torch.ops.farfield.fire_bias, arguments)


def test_compiled_equals_plain(device: str) -> None:
    leaves = _leaves(Case(2, 9, 9, W=5).fire(device))

    def loss(*tensors: Tensor) -> Tensor:
        return fire_bias(*tensors, 9, 9, half_length=4.0).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        (torch.zeros(2, 7), {}, r"table is torch.float32 \[2, 7\]; it must be float32 \[heads, at least 8\]"),
        (torch.zeros(2, 8).half(), {}, "table is torch.float16"),
        (torch.zeros(2, 8), {"offset": -1}, "offset -1"),
        (torch.zeros(2, 8), {"dtype": torch.float64}, "dtype torch.float64; choose from"),
    ],
)
def test_what_does_not_fit_is_refused(table: Tensor, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toeplitz_bias(table, 8, 8, **changes)  # type: ignore[arg-type]


def test_fire_refuses_parameters_of_another_shape() -> None:
    tensors = Case(2, 8, 8).fire()
    tensors[3] = torch.zeros(31)
    with pytest.raises(ValueError, match=r"bias1 is torch.float32 \[31\]; it must be float32 \[32\]"):
        fire_bias(*tensors, 8, 8, half_length=4.0)
    with pytest.raises(ValueError, match="width 65; at most 64 and 64"):
        fire_bias(*Case(2, 8, 8, W=65).fire(), 8, 8, half_length=4.0)
