"""The operator in Triton's interpreter (or on a GPU), compared with float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kernel_references
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_types import pair_with_types
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.kernels.biased_attention import configs
from megatron.kernels.biased_attention import tables as tables_module
from megatron.kernels.biased_attention.backward_dkdv import count_rows
from megatron.kernels.biased_attention.op import biased_attention, biased_attention_with_lse
from megatron.kernels.biased_attention.tables import MARGIN, arrange_tables, select_table_heads, share_table
from megatron.kernels.runtime import get_arch, launch_context
from tools.tolerances import SAFETY_FACTOR, assert_within_rounding, compute_error_ratio

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dweight", "dkey_bias", "dsinks")
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Arguments of one operator call."""

    B: int
    H: int
    R: int
    C: int
    d: int
    offset: int = 0
    window: int | None = None
    bias: bool = True
    weight: bool = False
    keys: float = 0.0
    """Mean increase of the key bias from one key to the next; 0 for no key bias."""
    documents: tuple[tuple[int, ...], ...] = ()
    """Document lengths of each sequence, C in total; empty for one document each."""
    sinks: bool = False
    ends_at_window: bool = False
    """True if tables have no entries beyond the window, which no row needs."""

    def document_starts(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the start of the document of each row, int32 [B, R]."""
        if not self.documents:
            return None
        starts = [
            torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths))
            for lengths in self.documents
        ]
        return torch.stack(starts)[:, self.offset : self.offset + self.R].to(device, torch.int32)

    def options(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return the arguments of the operator without gradients."""
        return {"offset": self.offset, "window": self.window, "document_starts": self.document_starts(device)}

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the tensors of the operator.

        They are q, k, v in `dtype`, a bias that falls with the distance and weights around 1, float32 [H, offset + R],
        and a key bias that rises from a large number, float64 [B, H, C].
        """
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(self.B, self.H, self.R, self.d, generator=generator)
        k = torch.randn(self.B, self.H, self.C, self.d, generator=generator)
        v = torch.randn(self.B, self.H, self.C, self.d, generator=generator)
        size = self.offset + self.R
        slope = -torch.log1p(torch.arange(size)) * torch.rand(self.H, 1, generator=generator)
        bias = slope + 0.1 * torch.randn(self.H, size, generator=generator)
        weight = torch.rand(self.H, size, generator=generator) + 0.5
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        key_bias = None
        if self.keys:
            steps = torch.rand(self.B, self.H, self.C, generator=generator, dtype=torch.float64)
            key_bias = (1_000 + (2 * self.keys * steps).cumsum(-1)).to(device)
        if self.ends_at_window:
            bias, weight = bias[:, : self.window].contiguous(), weight[:, : self.window].contiguous()
        return q, k, v, bias.to(device) if self.bias else None, weight.to(device) if self.weight else None, key_bias

    def sink_logits(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return sink logits of the size of the scores and above.

        If they were much lower, few rows would dominate the gradient.
        """
        return torch.linspace(1, 6, self.H, device=device) if self.sinks else None


SMALL = (
    Case(1, 2, 40, 40, 16),
    Case(2, 3, 33, 33, 8, weight=True),
    Case(1, 2, 37, 50, 20, offset=13, weight=True),
    Case(1, 1, 50, 50, 16, window=7),
    Case(1, 1, 64, 64, 16, window=20, ends_at_window=True),
    Case(1, 2, 35, 90, 80, offset=55, window=40, bias=False, weight=True),
    Case(1, 5, 1, 77, 16, offset=76),
    Case(1, 1, 70, 70, 16, bias=False),
    Case(1, 1, 60, 60, 24, window=33, bias=False),
    Case(1, 1, 32, 60, 16, offset=17),
    Case(2, 2, 75, 75, 16, documents=((10, 33, 2, 30), (75,))),
    Case(2, 1, 40, 75, 20, offset=35, weight=True, documents=((20, 32, 16, 7), (74, 1))),
    Case(2, 1, 75, 75, 16, window=9, documents=((10, 33, 2, 30), (32, 1, 1, 41))),
    Case(2, 2, 70, 70, 20, bias=False, keys=0.7),
    Case(1, 2, 35, 90, 80, offset=55, window=40, weight=True, keys=0.1),
    Case(2, 1, 75, 75, 16, keys=0.3, documents=((10, 33, 2, 30), (75,))),
    Case(2, 3, 37, 50, 20, offset=13, weight=True, sinks=True),
    Case(1, 2, 70, 70, 16, window=9, bias=False, sinks=True),
    Case(2, 2, 40, 75, 80, offset=35, documents=((20, 32, 16, 7), (74, 1)), sinks=True),
)
"""For the interpreter: ragged edges, head dimensions in two parts and padded, offsets, windows, invisible columns, a
tile whose last column is the first of a block, documents that start within and at tiles, and sinks."""


def _leaf(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if x is None else x.detach().to(dtype or x.dtype).requires_grad_()


def _upstream(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return gradients of the output, in its type, and of the logsumexp."""
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(case.B, case.H, case.R, case.d, generator=generator)
    return grad.to(device, dtype), torch.randn(case.B, case.H, case.R, generator=generator).to(device)


def _differentiated(
    attend: Callable[..., tuple[Tensor, Tensor]], case: Case, inputs: Sequence[Tensor | None], into: Sequence[Tensor]
) -> Values:
    sinks = case.sink_logits(into[0].device)
    leaves = [
        _leaf(x)
        for x in (*inputs, None if sinks is None else sinks.to(torch.promote_types(inputs[0].dtype, torch.float32)))
    ]
    out, lse = attend(*leaves[:-1], **case.options(into[0].device), sinks=leaves[-1])
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad((out, lse), wanted, [x.to(out.dtype) for x in into[:1]] + [into[1].to(lse.dtype)]))
    values = [out.detach(), lse.detach(), *(None if x is None else next(found) for x in leaves)]
    return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}


def _ours(case: Case, dtype: torch.dtype, device: str) -> Values:
    inputs = case.inputs(dtype, device)
    return _differentiated(biased_attention_with_lse, case, inputs, _upstream(case, dtype, device))


def _doubled(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


def _truth(case: Case, dtype: torch.dtype) -> Values:
    """Compute the reference and its gradients by autograd in float64, from inputs rounded to a type."""

    def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return kernel_references.biased_attention_with_lse(*tensors, **options)

    return _differentiated(attend, case, _doubled(case.inputs(dtype)), _upstream(case, dtype))


def _flash(case: Case, dtype: torch.dtype, delta: float = 1.0) -> Callable[[], Values]:
    """Return a computation from the formulas of the kernels (backward_dq.py), which can round like the kernels."""
    q, k, v, bias, weight, key_bias = _doubled(case.inputs(dtype))
    grad, grad_lse = _doubled(_upstream(case, dtype))
    distance = case.offset + torch.arange(case.R)[:, None] - torch.arange(case.C)
    visible = (distance >= 0) if case.window is None else (distance >= 0) & (distance < case.window)
    n, scale = distance.where(visible, 0), case.d**-0.5
    if (document_starts := case.document_starts()) is not None:
        visible = visible & (torch.arange(case.C) >= document_starts[:, None, :, None])

    # Differences, computed in float64; large only in lse.
    own = (case.offset + torch.arange(case.R)).clamp(max=case.C - 1)
    near = None if key_bias is None else key_bias[:, :, None, :] - key_bias[:, :, own, None]

    def diagonals(of_scores: Tensor) -> Tensor:
        size = next(table for table in (bias, weight) if table is not None).shape[1]
        empty = torch.zeros(case.H, size, dtype=torch.float64)
        return empty.index_put((torch.arange(case.H)[:, None, None], n), of_scores.sum(0), accumulate=True)

    def compute() -> Values:
        products = (q @ k.mT) * scale
        scores = products if weight is None else products * weight[:, n]
        scores = scores if bias is None else scores + bias[:, n]
        scores = scores if near is None else scores + near
        scores = scores.masked_fill(~visible, float("-inf"))
        if (sinks := case.sink_logits()) is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(case.B, -1, case.R, 1)], -1)
        every = torch.softmax(scores, -1)
        p = every[..., : case.C]
        out = p @ v
        # A matrix product, because its inputs are rounded: the kernel reads the output back from memory.
        mean = (grad.unsqueeze(-2) @ out.unsqueeze(-1)).squeeze(-1) - grad_lse.unsqueeze(-1)
        ds = p * (grad @ v.mT - (mean if delta == 1 else mean * delta))
        into = ds if weight is None else ds * weight[:, n]
        lse = torch.logsumexp(scores, -1)
        found = {"out": out, "lse": lse if key_bias is None else lse + key_bias[:, :, own]}
        found |= {"dq": (into @ k) * scale, "dk": (into.mT @ q) * scale, "dv": p.mT @ grad}
        if bias is not None:
            found["dbias"] = diagonals(ds)
        if weight is not None:
            found["dweight"] = diagonals(ds * products)
        if key_bias is not None:
            found["dkey_bias"] = ds.sum(2)
        if sinks is not None:
            found["dsinks"] = -(every[..., -1:] * mean).sum((0, 2, 3))
        return found

    return compute


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rounding_formulas_match_the_reference(case: Case) -> None:
    found, truth = _flash(case, torch.float32)(), _truth(case, torch.float32)
    assert found.keys() == truth.keys()
    for name, exact in truth.items():
        torch.testing.assert_close(found[name], exact, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(("case", "dtype"), pair_with_types(SMALL), ids=str)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_outputs_and_gradients_err_by_rounding_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    found = _ours(case, dtype, device)
    kinds = {name: torch.float32 if name in ("lse", "dbias", "dweight", "dsinks") else dtype for name in found}
    kinds |= {"dkey_bias": torch.float64} if case.keys else {}
    assert {name: x.dtype for name, x in found.items()} == kinds
    assert_within_rounding(found, _flash(case, dtype), dtype)


def _scaled(name: str, by: float) -> Callable[[Case, torch.dtype], Values]:
    def fault(case: Case, dtype: torch.dtype) -> Values:
        found = _truth(case, dtype)
        found[name][0, 1, 3] *= by
        return found

    return fault


FAULTS: dict[str, Callable[[Case, torch.dtype], Values]] = {
    "dq from dS without delta": lambda case, dtype: (
        _truth(case, dtype) | {"dq": _flash(case, dtype, delta=0.0)()["dq"]}
    ),
    "out misses the farthest key of a row": lambda case, dtype: (
        _truth(case, dtype) | {"out": _truth(replace(case, window=case.C - 1), dtype)["out"]}
    ),
    "dk has a row that is 1.1 of itself": _scaled("dk", 1.1),
    "dbias is NaN": lambda case, dtype: _truth(case, dtype) | {"dbias": _truth(case, dtype)["dbias"] * float("nan")},
    "lse is rounded to a half type": lambda case, dtype: (
        _truth(case, dtype) | {"lse": _truth(case, dtype)["lse"].bfloat16().double()}
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_more_than_rounding(fault: str, dtype: torch.dtype) -> None:
    """Faults that a larger tolerance would hide are detected; the rest of each result is exact."""
    case = replace(SMALL[2], R=20, C=20, offset=0)
    ratios = compute_error_ratio(FAULTS[fault](case, dtype), _flash(case, dtype), dtype)
    assert [name for name, ratio in ratios.items() if ratio > SAFETY_FACTOR] == [fault.split()[0]]


def test_tf32_is_more_than_the_rounding_of_float32() -> None:
    case = SMALL[2]
    found, truth = _truth(case, torch.float32), _truth(case, torch.float32)
    for name in ("out", "dq", "dk", "dv"):
        found[name] = truth[name] * (1 + 2.0**-11 * torch.rand_like(truth[name]))
        assert compute_error_ratio(found, _flash(case, torch.float32), torch.float32)[name] > SAFETY_FACTOR


def test_the_output_is_laid_out_as_activations(device: str) -> None:
    q, k, v, *_ = Case(2, 3, 5, 5, 16).inputs(torch.float32, device)
    assert q.is_contiguous()
    assert biased_attention(q, k, v).permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("case", [SMALL[1], SMALL[3]], ids=str)
def test_bitwise_repeatable(case: Case, device: str) -> None:
    first, second = (_ours(case, torch.float16, device) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_few_groups_share_many_row_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table gradients are correct if one program processes several row blocks, in both passes."""
    monkeypatch.setattr(configs, "PARTIAL_SUMS", 2)
    tile = configs.Tile(16, 16, 1, 1)
    monkeypatch.setattr(configs, "INTERPRETED", configs.OpTiles(tile, tile, tile))
    case = Case(1, 1, 70, 70, 16, weight=True)
    assert_within_rounding(_ours(case, torch.float32, device), _flash(case, torch.float32), torch.float32)


def test_a_bias_that_is_added_to_all_distances_changes_nothing(device: str) -> None:
    """The table's gradient sums to zero over n up to rounding, because a constant bias has no effect."""
    case = SMALL[0]
    q, k, v, bias, *_ = (_leaf(x) for x in case.inputs(torch.float32, device))
    biased_attention(q, k, v, bias).square().sum().backward()
    assert bias is not None
    assert bias.grad is not None
    scale = bias.grad.abs().sum(1) * torch.finfo(torch.float32).eps
    assert (bias.grad.sum(1).abs() <= 16 * scale).all()
    assert bias.grad.abs().max() > 1e-3


def test_an_infinite_bias_hides_a_distance(device: str) -> None:
    """An infinite bias hides a distance, even if it hides all of a row's first tiles."""
    case = Case(1, 2, 60, 60, 16)
    q, k, v, bias, *_ = (_leaf(x) for x in case.inputs(torch.float32, device))
    hidden = torch.zeros_like(bias)
    hidden[:, 9:] = float("-inf")
    ours = torch.autograd.grad(biased_attention(q, k, v, bias + hidden).square().sum(), (q, k, v, bias))
    windowed = torch.autograd.grad(biased_attention(q, k, v, bias, window=9).square().sum(), (q, k, v, bias))
    for one, other in zip(ours, windowed, strict=True):
        torch.testing.assert_close(one, other)


def test_a_negative_scale_equals_negated_queries(device: str) -> None:
    case = Case(1, 2, 40, 40, 16)
    q, k, v, bias, *_ = (_leaf(x) for x in case.inputs(torch.float16, device))
    ours = torch.autograd.grad(biased_attention(q, k, v, bias, scale=-0.25).square().sum(), (q, k, v, bias))
    negated = torch.autograd.grad(biased_attention(-q, k, v, bias, scale=0.25).square().sum(), (q, k, v, bias))
    for one, other in zip(ours, negated, strict=True):
        assert torch.equal(one, other)


def test_arranged_tables_have_the_entries_of_four_scores_side_by_side(device: str) -> None:
    table = torch.randn(3, 37, device=device)
    arranged = arrange_tables(table, None, scale=0.5).bias_ptr
    margin = MARGIN.value
    padded = torch.nn.functional.pad(table, (margin + 8, margin + 8)) * 2
    for element, distance in enumerate((0, -1, 8, 7)):
        first = 8 + distance
        assert torch.equal(arranged[:, :, element], padded[:, first : first + 37 + 2 * margin]), element


@pytest.fixture
def arranged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the sizes of the tables that are arranged while a test runs."""
    sizes: list[int] = []
    launch = tables_module.launch

    def launch_and_count(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], *rest: Any) -> None:
        sizes.append(arguments[2])
        launch(kernel, grid, arguments, *rest)

    monkeypatch.setattr(tables_module, "launch", launch_and_count)
    return sizes


def test_calls_with_one_table_arrange_it_once(device: str, arranged: list[int]) -> None:
    """The arranged table follows changes of the table and of the scale."""
    q, k, v, table = _inputs(2, 9, device)
    before = table.clone()
    first = biased_attention(q, k, v, table)
    assert torch.equal(biased_attention(q, k, v, table), first)
    assert arranged == [9]
    scaled = biased_attention(q, k, v, table, scale=0.5)
    table += torch.arange(9, device=device)
    changed = biased_attention(q, k, v, table)
    assert arranged == [9] * 3
    assert torch.equal(scaled, biased_attention(q, k, v, before, scale=0.5))
    assert torch.equal(changed, biased_attention(q, k, v, table.clone()))
    assert not torch.equal(changed, first)
    with torch.inference_mode():
        assert torch.equal(biased_attention(q, k, v, table.clone()), changed)


def test_a_parameter_is_arranged_by_each_call(device: str, arranged: list[int]) -> None:
    """A replayed CUDA graph changes a parameter without a new version."""
    q, k, v, table = _inputs(2, 9, device)
    parameter = torch.nn.Parameter(table)
    for count in (1, 2):
        biased_attention(q, k, v, parameter)
        assert len(arranged) == count


def test_calls_with_some_heads_of_one_table_arrange_them_once(device: str, arranged: list[int]) -> None:
    """Layers of a tensor-parallel rank share the arranged rows of its heads, and the buffer of their gradients."""
    q, k, v, table = _inputs(2, 9, device)
    heads, leaf = slice(1, 3), torch.nn.Parameter(torch.cat([table, table + 1]))

    def differentiate(select: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        shared = share_table(2 * leaf)
        outputs = [biased_attention(q * factor, k, v, select(shared)) for factor in (1, 2, 3)]
        (gradient,) = torch.autograd.grad(torch.stack(outputs).square().sum(), leaf)
        return outputs, gradient

    outputs, gradient = differentiate(lambda table: select_table_heads(table, heads))
    assert arranged == [9]
    expected, expected_gradient = differentiate(lambda table: table[heads])
    assert len(arranged) == 4
    assert all(torch.equal(ours, other) for ours, other in zip(outputs, expected, strict=True))
    torch.testing.assert_close(gradient, expected_gradient)
    assert not gradient[[0, 3]].any()
    assert gradient[heads].all()
    whole = 2 * leaf.detach()
    assert select_table_heads(whole, slice(None)) is whole
    first = select_table_heads(whole, heads)
    assert select_table_heads(whole, heads) is first
    assert torch.equal(select_table_heads(whole, slice(0, 2)), whole[:2])
    whole += 1
    assert torch.equal(select_table_heads(whole, slice(0, 2)), whole[:2])
    with torch.no_grad():
        selected = select_table_heads(2 * leaf, heads)
    assert not selected.requires_grad


def _inputs(heads: int, length: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, heads, length, 16, device=device) for _ in range(3))
    return q, k, v, torch.randn(heads, length, device=device)


@given(
    rows=st.integers(1, 40),
    offset=st.integers(0, 30),
    beyond=st.integers(-12, 12),
    window=st.none() | st.integers(1, 40),
    transposed=st.booleans(),
)
@settings(max_examples=12)
def test_any_lengths_offset_window_and_layout(
    rows: int, offset: int, beyond: int, window: int | None, transposed: bool, device: str
) -> None:
    columns = max(offset + rows + beyond, 1)
    if window is not None:
        window = max(window, offset + rows - columns + 1)  # every row sees a key
    case = Case(1, 1, rows, columns, 16, offset=offset, window=window)
    q, k, v, bias, *_ = case.inputs(torch.float32, device)
    if transposed:
        q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
    found = {"out": biased_attention(q, k, v, bias, offset=offset, window=window)}
    truth = _doubled(case.inputs(torch.float32))
    assert_within_rounding(
        found,
        lambda: {"out": kernel_references.biased_attention(*truth, offset=offset, window=window)},
        torch.float32,
    )


def test_tiles_of_other_documents_are_not_read(device: str) -> None:
    """Time falls with the documents' length: NaN in one document does not reach another."""
    tiles = configs.choose_tiles(get_arch(torch.zeros(1, device=device)), torch.float32, 16)
    size = max(max(tile.block_m, tile.block_n) for tile in (tiles.fwd, tiles.bwd_dq, tiles.bwd_dkdv))
    case = Case(1, 1, 5 * size, 5 * size, 16, documents=((2 * size, size, 2 * size),))
    q, k, v, bias, *_ = case.inputs(torch.float32, device)
    upstream = _upstream(case, torch.float32, device)[0]
    found = []
    for nan in (False, True):
        for x in (q, k, v, upstream):
            if nan:
                x[:, :, 2 * size : 3 * size] = float("nan")
        leaves = [_leaf(x) for x in (q, k, v)]
        out = biased_attention(*leaves, bias, document_starts=case.document_starts(device))  # type: ignore[arg-type]
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])  # type: ignore[arg-type]
    for clean, other in zip(*found, strict=True):
        assert torch.equal(other.isnan().any(-1).nonzero()[:, 2].cpu(), torch.arange(2 * size, 3 * size))
        for part in (slice(0, 2 * size), slice(3 * size, None)):
            assert torch.equal(clean[:, :, part], other[:, :, part])


@pytest.mark.parametrize("pieces", [1, 40, 129, 16_500])
def test_rows_are_counted_by_any_number_of_searches(pieces: int, device: str) -> None:
    """Row counts from one, two and three search steps match a direct count."""
    lengths = torch.randint(1, 4, (pieces,), generator=torch.Generator().manual_seed(pieces))
    document_starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).int().to(device)
    rows = len(document_starts)
    for column in {0, 1, rows // 3, rows - 1, rows + 5}:
        counted = torch.zeros(1, dtype=torch.int32, device=device)
        with launch_context(document_starts):
            _count_rows_kernel[(1,)](document_starts, counted, column, rows)
        assert counted.item() == (document_starts <= column).sum()


@triton.jit
def _count_rows_kernel(document_starts_ptr, counted_ptr, column, R):
    tl.store(counted_ptr, count_rows(document_starts_ptr, column, R))


def test_compiled_and_checkpointed_equal_plain_calls(device: str) -> None:
    inputs = [_leaf(x) for x in Case(1, 2, 20, 20, 16).inputs(torch.float32, device)[:4]]

    def loss(*tensors: Tensor) -> Tensor:
        return biased_attention(*tensors, window=11).square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compile_kernel = torch.compile(loss, backend="aot_eager")
    found = torch.autograd.grad(compile_kernel(*inputs), inputs)
    recomputed = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs)
    for one, two, three in zip(expected, found, recomputed, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_fixed_tables_need_no_gradient(device: str) -> None:
    q, k, v, bias, weight, _ = Case(1, 1, 20, 20, 16, weight=True).inputs(torch.float32, device)
    q.requires_grad_()
    biased_attention(q, k, v, bias, weight).sum().backward()
    assert q.grad is not None
    assert bias is not None
    assert bias.grad is None


def _call(device: str, **changes: object) -> None:
    changes = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in changes.items()}
    q, k, v, bias, *_ = Case(1, 2, 8, 8, 16).inputs(torch.float32, device)
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
        ({"scale": 0}, "scale 0.0; it must not be 0"),
        ({"bias": torch.zeros(2, 7)}, r"bias has shape \[2, 7\]; it must be \[2, at least 8\]"),
        ({"bias": torch.zeros(2, 8, dtype=torch.float16)}, "bias is torch.float16"),
        ({"weight": torch.zeros(2, 9)}, "must have the same shape"),
        ({name: torch.zeros(1, 2, 8, 144) for name in "qkv"}, "head dimension 144"),
        ({"bias": None, "offset": 20, "window": 4}, "sees none of the 8 keys"),
        ({"key_bias": torch.zeros(1, 2, 9)}, r"key_bias is torch.float32 \[1, 2, 9\] .* float64 \[1, 2, 8\]"),
        ({"key_bias": torch.zeros(1, 2, 8).half()}, "key_bias is torch.float16"),
        (
            {"document_starts": torch.zeros(1, 8)},
            r"document_starts is torch.float32 \[1, 8\] on .*; it must be "
            r"torch.int32",
        ),
        (
            {"document_starts": torch.zeros(1, 9, dtype=torch.int32)},
            r"torch.int32 \[1, 9\] .* must be torch.int32 "
            r"\[1, 8\]",
        ),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict[str, object], message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(device, **changes)


def test_a_table_that_calls_share_gets_the_sum_of_their_gradients(device: str) -> None:
    """Calls that share a table accumulate their gradients in one buffer, together with other uses of the table.

    The graph may be differentiated twice.
    """
    alike, other = Case(1, 2, 9, 9, 8, weight=True), Case(2, 2, 35, 35, 8, weight=True)
    tables = [_leaf(x) for x in other.inputs(torch.float32, device)[3:5]]
    cases = [alike, other, alike, other, alike]
    inputs = [[_leaf(x) for x in case.inputs(torch.float32, device, seed)[:3]] for seed, case in enumerate(cases)]

    def differentiate(share: Callable[[Tensor], Tensor], repeats: int) -> list[Tensor]:
        bias, weight = (share(table) for table in tables)  # type: ignore[arg-type]
        outputs = [biased_attention(*qkv, bias, weight) for qkv in inputs]  # type: ignore[arg-type]
        outputs.append(bias * weight)
        loss = sum(output.square().sum() for output in outputs)
        torch.autograd.grad(loss, inputs[0][0], retain_graph=True)  # type: ignore[arg-type]  # leaves nothing behind
        for _ in range(repeats):
            loss.backward(retain_graph=True)  # type: ignore[union-attr]
        leaves = [*tables, *(x for qkv in inputs for x in qkv)]
        gradients = [x.grad for x in leaves]  # type: ignore[union-attr]
        for x in leaves:
            x.grad = None  # type: ignore[union-attr]
        return gradients  # type: ignore[return-value]

    expected = differentiate(lambda table: table, 1)
    for repeats in (1, 2):
        found = differentiate(share_table, repeats)
        for number, (own, whole) in enumerate(zip(expected, found, strict=True)):
            if number < len(tables):
                torch.testing.assert_close(whole, repeats * own)
            else:
                torch.testing.assert_close(whole, repeats * own, rtol=0, atol=0)
    with torch.no_grad():
        assert share_table(tables[0]) is tables[0]  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(RuntimeError, match="this kernel needs a CUDA device, its tensors are on cpu"):
        biased_attention(x, x, x)
