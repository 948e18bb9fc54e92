"""Bias matrices in Triton's interpreter (or on a GPU), compared with float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import kernel_references
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.kernels.bias import toeplitz
from megatron.kernels.bias.fire import fire_bias
from megatron.kernels.bias.toeplitz import toeplitz_bias
from tools.tolerances import SAFETY_FACTOR, assert_within_rounding, compute_error_ratio

FIRE = ("c", "multiplier", "weight1", "bias1", "weight2", "bias2")


@dataclass(frozen=True)
class Case:
    """Arguments of one bias matrix."""

    H: int
    R: int
    C: int
    offset: int = 0
    W: int = 32
    half_length: float = 16.0

    def table(self, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        """Return a float32 table [H, N], slightly longer than needed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.H, self.offset + self.R + 3, generator=generator).to(device)

    def fire(self, device: torch.device | str = "cpu", seed: int = 0) -> list[Tensor]:
        """Return c, multiplier, weight1, bias1, weight2, bias2 in float32, with FIRE's initialization."""
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int, bound: float = 1.0) -> Tensor:
            return (2 * torch.rand(shape, generator=generator) - 1) * bound

        bound = self.W**-0.5
        second = [uniform(self.H, self.W, bound=bound), uniform(self.H, bound=bound)]
        tensors = [torch.tensor([0.1]), torch.tensor([1.1]), uniform(self.W, 1), uniform(self.W), *second]
        return [x.to(device) for x in tensors]


SMALL = (
    Case(2, 18, 18, W=16, half_length=8.0),
    Case(3, 9, 20, offset=11, W=20, half_length=8.0),
    Case(1, 19, 10, W=7, half_length=8.0),
    Case(5, 1, 23, offset=22, W=5),
)
"""For the interpreter: square, with an offset, columns that end early, one row."""


def _upstream(case: Case, device: str = "cpu") -> Tensor:
    return torch.randn(case.H, case.R, case.C, generator=torch.Generator().manual_seed(1)).to(device)


def _leaves(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


@pytest.mark.parametrize("above", [0.0, float("-inf")])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_toeplitz_equals_indexing(case: Case, above: float, dtype: torch.dtype, device: str) -> None:
    table = case.table(device)
    found = toeplitz_bias(table, case.R, case.C, offset=case.offset, dtype=dtype, above=above)
    assert torch.equal(
        found, kernel_references.toeplitz_bias(table, case.R, case.C, offset=case.offset, dtype=dtype, above=above)
    )


def _table_gradient(case: Case, dtype: torch.dtype, device: str) -> Tensor:
    table = case.table(device).requires_grad_()
    out = toeplitz_bias(table, case.R, case.C, offset=case.offset, dtype=dtype)
    return torch.autograd.grad(out, table, _upstream(case, device).to(dtype))[0]


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("rows_per_part", [None, 7], ids=["whole", "parts"])
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_table_gradient_is_the_sum_of_each_diagonal(
    case: Case, rows_per_part: int | None, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows_per_part is not None:
        monkeypatch.setattr(toeplitz, "split_rows", lambda programs, rows: (-(-rows // rows_per_part), rows_per_part))
    found = {"table": _table_gradient(case, dtype, device)}
    table, grad = case.table().double().requires_grad_(), _upstream(case).to(dtype).double()

    def compute() -> dict[str, Tensor]:
        out = kernel_references.toeplitz_bias(table, case.R, case.C, offset=case.offset, dtype=torch.float64)
        return {"table": torch.autograd.grad(out, table, grad)[0]}

    # Sums are float32 for every data type.
    assert_within_rounding(found, compute, torch.float32)
    found["table"][0, case.offset] += grad[0, -1, 0].to(found["table"])
    assert compute_error_ratio(found, compute, torch.float32)["table"] > SAFETY_FACTOR, (
        "a term counted twice would be let through"
    )


@given(rows=st.integers(1, 25), columns=st.integers(1, 25), offset=st.integers(0, 20))
@settings(max_examples=15)
def test_gradient_of_ones_counts_the_diagonals(rows: int, columns: int, offset: int, device: str) -> None:
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


def test_a_table_that_is_not_a_number_is_not_hidden_by_saturation(device: str) -> None:
    table = torch.tensor([[0.0, float("nan"), 1.0]], device=device)
    matrix = toeplitz_bias(table, 3, 3, dtype=torch.float16)
    assert matrix[0].isnan().tolist() == [[False] * 3, [True, False, False], [False, True, False]]


@pytest.mark.parametrize("name", ["c", "multiplier", "weight1", "bias1", "weight2"])
def test_a_parameter_of_fire_that_is_not_a_number_shows_in_the_bias(name: str, device: str) -> None:
    """As in PyTorch, whose relu keeps NaN. On a GPU the larger of NaN and 0 is 0."""
    case = SMALL[0]
    leaves = case.fire(device)
    leaves[FIRE.index(name)].view(-1)[0] = float("nan")
    out = fire_bias(*leaves, case.R, case.C, half_length=case.half_length)
    expected = kernel_references.fire_bias(*leaves, case.R, case.C, half_length=case.half_length)
    assert expected.isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())


def _fire(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    leaves = _leaves(case.fire(device))
    out = fire_bias(*leaves, case.R, case.C, half_length=case.half_length, offset=case.offset, dtype=dtype)
    return _with_gradients(out, leaves, _upstream(case, device).to(dtype))


def _with_gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    return {"bias": out.detach(), **dict(zip(FIRE, torch.autograd.grad(out, leaves, grad), strict=True))}


def _fire_reference(case: Case, dtype: torch.dtype) -> Callable[[], dict[str, Tensor]]:
    leaves, grad = _leaves(case.fire(), torch.float64), _upstream(case).to(dtype).double()
    options = {"half_length": case.half_length, "offset": case.offset, "dtype": torch.float64}
    return lambda: _with_gradients(kernel_references.fire_bias(*leaves, case.R, case.C, **options), leaves, grad)


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_fire_and_all_its_gradients_err_by_rounding_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    """FIRE is computed in float32 for every data type; only its bias and the incoming gradient use the type."""
    assert_within_rounding(_fire(case, dtype, device), _fire_reference(case, dtype), torch.float32)


@pytest.mark.parametrize("name", FIRE)
def test_a_row_too_few_in_a_gradient_is_more_than_rounding(name: str) -> None:
    case = SMALL[0]
    found, compute = _fire_reference(case, torch.float32)(), _fire_reference(case, torch.float32)
    found[name] = _fire_reference(replace(case, R=case.R - 1), torch.float32)()[name]
    assert compute_error_ratio(found, compute, torch.float32)[name] > SAFETY_FACTOR


def test_the_multiplier_has_no_gradient_if_all_rows_exceed_it(device: str) -> None:
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
    first, second = (_fire(SMALL[1], torch.float32, device) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert torch.equal(*(_table_gradient(SMALL[1], torch.float16, device) for _ in range(2)))


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
def test_invalid_arguments_are_rejected(table: Tensor, changes: dict[str, object], message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        toeplitz_bias(table.to(device), 8, 8, **changes)  # type: ignore[arg-type]


def test_fire_refuses_parameters_of_another_shape(device: str) -> None:
    tensors = Case(2, 8, 8).fire(device)
    tensors[3] = torch.zeros(31, device=device)
    with pytest.raises(ValueError, match=r"bias1 is torch.float32 \[31\]; it must be float32 \[32\]"):
        fire_bias(*tensors, 8, 8, half_length=4.0)
    with pytest.raises(ValueError, match="width 65; the maximum is 64 and 64"):
        fire_bias(*Case(2, 8, 8, W=65).fire(device), 8, 8, half_length=4.0)
