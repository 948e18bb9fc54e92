"""The operator in Triton's interpreter (or on a GPU) against float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.biased_attention import configs, reference
from kernels.biased_attention.cases import SMALL, Case
from kernels.biased_attention.op import biased_attention, biased_attention_with_lse

ROOT = Path(__file__).parents[3]
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dweight")


def _leaf(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if x is None else x.detach().to(dtype or x.dtype).requires_grad_()


def _upstream(case: Case, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(case.B, case.H, case.R, case.d, generator=generator)
    return grad.to(device), torch.randn(case.B, case.H, case.R, generator=generator).to(device)


def _ours(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    inputs = [_leaf(x) for x in case.inputs(dtype, device)]
    out, lse = biased_attention_with_lse(*inputs, offset=case.offset, window=case.window)
    grad, grad_lse = _upstream(case, device)
    return _named(inputs, out, lse, grad.to(out.dtype), grad_lse)


def _plain(case: Case, dtype: torch.dtype, device: str, compute: torch.dtype) -> dict[str, Tensor]:
    """The reference on the same inputs; tables keep at least float32."""
    q, k, v, bias, weight = case.inputs(dtype, device)
    tables = torch.promote_types(compute, torch.float32)
    inputs = [*(_leaf(x, compute) for x in (q, k, v)), _leaf(bias, tables), _leaf(weight, tables)]
    out = reference.biased_attention(*inputs, offset=case.offset, window=case.window)
    lse = reference.logsumexp(*inputs, offset=case.offset, window=case.window)
    grad, grad_lse = _upstream(case, device)
    return _named(inputs, out, lse, grad.to(dtype).to(compute), grad_lse.to(lse.dtype))


def _named(inputs: list[Tensor | None], out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    wanted = [x for x in inputs if x is not None]
    found = iter(torch.autograd.grad((out, lse), wanted, (grad, grad_lse)))
    values = [out.detach(), lse.detach(), *(None if x is None else next(found) for x in inputs)]
    return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_error_is_at_most_twice_that_of_plain_pytorch(case: Case, dtype: torch.dtype, device: str) -> None:
    ours = _ours(case, dtype, device)
    plain = _plain(case, dtype, device, dtype)
    truth = _plain(case, dtype, device, torch.float64)
    assert set(ours) == set(truth)
    for name, exact in truth.items():
        assert ours[name].shape == exact.shape
        assert ours[name].dtype == plain[name].dtype
        ulp = torch.finfo(ours[name].dtype).eps
        # The norm of the errors is held to twice PyTorch's. The largest single one gets four times: rows with few keys
        # subtract dout·out from dout·v, equal up to rounding, where PyTorch subtracts a number from itself.
        for factor, size in ((2, torch.linalg.vector_norm), (4, lambda x: x.abs().max())):
            error, allowed = (size(x[name].double() - exact) for x in (ours, plain))
            assert error <= factor * allowed + size(exact) * ulp, f"{name}: {error} against {allowed} of plain PyTorch"


@pytest.mark.parametrize("case", [SMALL[1], SMALL[3]], ids=str)
def test_bitwise_repeatable(case: Case, device: str) -> None:
    first, second = (_ours(case, torch.float16, device) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_few_groups_share_many_row_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table gradients where a program works through several row blocks, forwards and backwards."""
    monkeypatch.setattr(configs, "PARTIAL_SUMS", 2)
    monkeypatch.setattr(configs, "INTERPRETED", configs.Config(*[configs.Tiles(16, 16, 1, 1)] * 3))
    case = Case(1, 1, 70, 70, 16, weight=True)
    ours, truth = _ours(case, torch.float32, device), _plain(case, torch.float32, device, torch.float64)
    for name in ("dq", "dbias", "dweight"):
        plain = _plain(case, torch.float32, device, torch.float32)[name]
        allowed = 2 * (plain - truth[name]).abs().max() + truth[name].abs().max() * torch.finfo(torch.float32).eps
        assert (ours[name] - truth[name]).abs().max() <= allowed, name


def test_a_bias_that_is_added_to_all_distances_changes_nothing(device: str) -> None:
    """So the table's gradient sums to zero over n; not exactly, each of its terms being rounded."""
    case = SMALL[0]
    q, k, v, bias, _ = (_leaf(x) for x in case.inputs(torch.float32, device))
    biased_attention(q, k, v, bias).square().sum().backward()
    assert bias is not None
    assert bias.grad is not None
    scale = bias.grad.abs().sum(1) * torch.finfo(torch.float32).eps
    assert (bias.grad.sum(1).abs() <= 16 * scale).all()
    assert bias.grad.abs().max() > 1e-3


def test_an_infinite_bias_hides_a_distance(device: str) -> None:
    """Even where a row's first tiles are hidden altogether."""
    case = Case(1, 2, 60, 60, 16)
    q, k, v, bias, _ = (_leaf(x) for x in case.inputs(torch.float32, device))
    hidden = torch.zeros_like(bias)
    hidden[:, 9:] = float("-inf")
    ours = torch.autograd.grad(biased_attention(q, k, v, bias + hidden).square().sum(), (q, k, v, bias))
    windowed = torch.autograd.grad(biased_attention(q, k, v, bias, window=9).square().sum(), (q, k, v, bias))
    for one, other in zip(ours, windowed, strict=True):
        torch.testing.assert_close(one, other)


@given(
    rows=st.integers(1, 40),
    offset=st.integers(0, 30),
    beyond=st.integers(-12, 12),
    window=st.none() | st.integers(1, 40),
    transposed=st.booleans(),
)
@settings(max_examples=12)
def test_any_lengths_offset_window_and_layout(
    rows: int, offset: int, beyond: int, window: int | None, transposed: bool
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns = max(offset + rows + beyond, 1)
    if window is not None:
        window = max(window, offset + rows - columns + 1)  # every row sees a key
    q, k, v, bias, _ = Case(1, 1, rows, columns, 16, offset=offset).inputs(torch.float32, device)
    truth = reference.biased_attention(q.double(), k.double(), v.double(), bias.double(), offset=offset, window=window)
    plain = reference.biased_attention(q, k, v, bias, offset=offset, window=window)
    if transposed:
        q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
    out = biased_attention(q, k, v, bias, offset=offset, window=window)
    allowed = 2 * (plain - truth).abs().max() + truth.abs().max() * torch.finfo(torch.float32).eps
    assert (out - truth).abs().max() <= allowed


def test_opcheck(device: str) -> None:
    case = Case(1, 2, 17, 20, 16, offset=3, weight=True)
    inputs = [_leaf(x) for x in case.inputs(torch.float32, device)]
    torch.library.opcheck(torch.ops.farfield.biased_attention, (*inputs, 3, None, 0.25))
    plain = [_leaf(x) for x in case.inputs(torch.float32, device)[:3]]
    torch.library.opcheck(torch.ops.farfield.biased_attention, (*plain, None, None, 3, 8, 0.25))


def test_compiled_and_checkpointed_equal_plain_calls(device: str) -> None:
    inputs = [_leaf(x) for x in Case(1, 2, 20, 20, 16).inputs(torch.float32, device)[:4]]

    def loss(*tensors: Tensor) -> Tensor:
        return biased_attention(*tensors, window=11).square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs), inputs)
    recomputed = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs)
    for one, two, three in zip(expected, found, recomputed, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_fixed_tables_need_no_gradient(device: str) -> None:
    q, k, v, bias, weight = Case(1, 1, 20, 20, 16, weight=True).inputs(torch.float32, device)
    q.requires_grad_()
    biased_attention(q, k, v, bias, weight).sum().backward()
    assert q.grad is not None
    assert bias is not None
    assert bias.grad is None


def _call(**changes: object) -> None:
    q, k, v, bias, _ = Case(1, 2, 8, 8, 16).inputs(torch.float32)
    arguments: dict[str, object] = {"q": q, "k": k, "v": v, "bias": bias}
    biased_attention(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 8, 16)}, r"q has shape \[2, 8, 16\]"),
        ({"k": torch.zeros(1, 2, 8, 16, dtype=torch.float16)}, "k is torch.float16"),
        ({"v": torch.zeros(1, 2, 9, 16)}, "do not fit"),
        ({"offset": -1}, "offset -1"),
        ({"window": 0}, "window 0"),
        ({"bias": torch.zeros(2, 7)}, r"bias has shape \[2, 7\]; it must be \[2, at least 8\]"),
        ({"bias": torch.zeros(2, 8, dtype=torch.float16)}, "bias is torch.float16"),
        ({"weight": torch.zeros(2, 9)}, "must have the same shape"),
        ({name: torch.zeros(1, 2, 8, 144) for name in "qkv"}, "head dimension 144"),
        ({"bias": None, "offset": 20, "window": 4}, "sees none of the 8 keys"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_cpu_tensors_need_the_interpreter() -> None:
    code = (
        "import torch\nfrom kernels.biased_attention.op import biased_attention\n"
        "x = torch.zeros(1, 1, 4, 16)\nbiased_attention(x, x, x)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "RuntimeError: this kernel needs a CUDA device" in done.stderr
