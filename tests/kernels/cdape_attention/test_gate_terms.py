"""Terms of gates before a processor, compared with Conv1 of the whole bias map in float64, including gradients."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32, CdapeProblem, list_chunks
from megatron.kernels.cdape_attention.gate_terms import (
    GateBias,
    GateSums,
    build_gate_operands,
    differentiate_gates,
)
from megatron.kernels.cdape_attention.geometry import HEADS, WIDTH
from megatron.kernels.cdape_attention.mixer_operands import (
    MAX_TILE_COLUMNS,
    build_fragments,
    list_tile_widths,
    unpack_weights,
)
from megatron.kernels.cdape_attention.weights import PackedWeights, get_weight_shape, pack_weights, unpack_gradients
from megatron.kernels.runtime import launch_context


@dataclass(frozen=True)
class Case:
    batch: int = 1
    heads: int = 16
    width: int = 32
    rows: int = 40
    offset: int = 0
    taps: int = 3
    window: int | None = None
    starts: tuple[int, ...] = (0,)
    """Positions at which documents begin; in the second sequence all but the first begin 5 tokens later."""
    chunk: int = 64
    is_residual: bool = True
    origin: float = 0.0
    """Number added to the row terms and subtracted from the column terms."""


FLOAT32, FLOAT64 = 2.0**-24, 2.0**-53
"""Largest relative errors of rounding to these types."""

CASES = [
    Case(batch=2, heads=9, width=17, origin=12_345.0),
    Case(rows=24, offset=48, chunk=16, is_residual=False),
    Case(heads=12, rows=72, window=9, chunk=40),
    Case(batch=2, width=20, rows=72, starts=(0, 3, 4, 41), chunk=40),
    Case(batch=2, heads=3, width=4, rows=72, starts=(0, 3, 4, 41), window=35, origin=-12_345.0),
    Case(heads=10, width=9, taps=1, rows=40, window=1),
    Case(rows=8, taps=1),
    Case(batch=2, heads=9, width=17, taps=5, rows=48, window=6, starts=(0, 3, 4, 41), chunk=24),
    Case(taps=7, rows=40, offset=8, window=35, chunk=24, origin=12_345.0),
]


class Layer:
    """Random bias and weights of a case, and where its rows see columns."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.columns, self.padding = case, case.offset + case.rows, case.taps // 2
        generator = torch.Generator().manual_seed(0)

        def leaf(*sizes: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(*sizes, generator=generator, dtype=torch.float64) * scale
            return drawn.to(device).requires_grad_()

        heads, width, taps = case.heads, case.width, case.taps
        self.row = (leaf(case.batch, heads, case.rows) + case.origin).detach().requires_grad_()
        self.key = (leaf(case.batch, heads, self.columns) - case.origin).detach().requires_grad_()
        self.w1, self.b1 = leaf(width, 2 * heads, 1, taps, scale=heads**-0.5), leaf(width)
        self.w2, self.b2 = leaf(heads, width, 1, taps), leaf(heads)
        later = [[begin + 5 * (sequence and begin > 0) for begin in case.starts] for sequence in range(case.batch)]
        self.position = case.offset + torch.arange(case.rows, device=device)
        begins = torch.tensor(later, device=device)
        first = torch.where(begins[:, None] <= self.position[:, None], begins[:, None], 0).amax(2)
        self.document_starts = first.int() if len(case.starts) > 1 else None
        self.first = first if case.window is None else torch.maximum(first, self.position - case.window + 1)

    @property
    def bias(self) -> GateBias:
        return GateBias(*(x.detach() for x in (self.row, self.key, self.w1, self.b1, self.w2)), self.case.is_residual)

    @property
    def problem(self) -> CdapeProblem:
        case, nothing = self.case, torch.empty(0)
        return CdapeProblem(
            *(nothing, nothing, PackedWeights(*(nothing,) * len(PackedWeights._fields))),
            *(get_weight_shape(case.heads, case.width, case.taps, False), case.rows, case.offset),
            *(NO_WINDOW_INT32 if case.window is None else case.window, torch.bfloat16, self.document_starts),
        )

    def convolve(self) -> Tensor:
        """Return Conv1 of the visible bias, [B, R, C + p, D]; columns beyond row i + p are meaningless."""
        index = torch.arange(self.columns + self.padding, device=self.first.device)
        is_seen = (index >= self.first[..., None]) & (index <= self.position[:, None])
        key = F.pad(self.key, (0, self.padding))
        visible = (self.row[..., None] + key[:, :, None]) * is_seen[:, None]
        weight = self.w1[:, self.case.heads :]
        return F.conv2d(F.pad(visible, (self.padding, self.padding)), weight, self.b1).permute(0, 2, 3, 1)

    def find_exceptions(self) -> tuple[Tensor, Tensor]:
        """Return the hidden columns of E, [B, R, 4p], and a mask of those that a map has, each once."""
        p, device = self.padding, self.first.device
        begin = self.first[..., None] + torch.arange(-p, p, device=device)
        end = (self.position[:, None] + torch.arange(1 - p, p + 1, device=device)).expand_as(begin)
        is_new = (end[..., None] != begin[..., None, :]).all(3)
        is_kept = torch.cat([(begin >= 0) & (begin <= self.position[:, None] + p), is_new & (end >= 0)], 2)
        return torch.cat([begin, end], 2), is_kept

    def list_regular(self) -> Tensor:
        """Return a mask [B, R, C + p] of the hidden columns whose taps are all visible."""
        index = torch.arange(self.columns + self.padding, device=self.first.device)
        return (index >= self.first[..., None] + self.padding) & (index <= self.position[:, None] - self.padding)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_terms_are_those_of_the_whole_map(case: Case, device: torch.device) -> None:
    layer = Layer(case, device)
    expected, exceptions, regular = layer.convolve().detach(), layer.find_exceptions(), layer.list_regular()
    p, front, fragments = layer.padding, MAX_TILE_COLUMNS, None
    # In float64, n = k · H products of sums of two terms of the origin's size err by at most n² of its roundings.
    origin_error = (case.taps * case.heads) ** 2 * FLOAT64 * (abs(case.origin) + 9)
    for chunk in list_chunks(layer.problem, case.chunk):
        with launch_context(layer.row):
            found = build_gate_operands(layer.problem, layer.bias, chunk, fragments)
        fragments, rows = found.fragments, slice(chunk.first, chunk.last)
        inside = slice(chunk.left, chunk.right + p)
        columns = found.columns[:, front : front + chunk.right - chunk.left + p]
        hidden = (found.rows.double()[:, :, None] + columns.double()[:, None])[..., : case.width]
        is_regular = regular[:, rows, inside, None]
        # Both terms are rounded to float32. They are relative to the first row, so the origin adds no error to them.
        bound = FLOAT32 * float(found.rows.abs().max() + columns.abs().max())
        error = (hidden - expected[:, rows, inside]) * is_regular
        assert error.abs().max() <= bound + origin_error
        assert not columns[..., case.width :].any()
        assert not found.columns[:, :front].any()
        if p:
            place, is_kept = (x[:, rows] for x in exceptions)
            of_map = expected[:, rows].gather(2, place.clamp(min=0)[..., None].expand(-1, -1, -1, case.width))
            edge = found.edge[..., : case.width].double() * is_kept[..., None]
            torch.testing.assert_close(edge, of_map * is_kept[..., None], rtol=FLOAT32, atol=origin_error)
        bias = found.bias[:, : case.heads, front : front + chunk.right - chunk.left].double()
        origin = layer.row[:, :, chunk.first : chunk.first + 1].detach() * case.is_residual
        terms = layer.key[:, :, chunk.left : chunk.right].detach() * case.is_residual + origin
        torch.testing.assert_close(bias, terms, rtol=FLOAT32, atol=origin_error)
        assert not found.bias[:, case.heads :].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_whole_map(case: Case, device: torch.device) -> None:
    layer = Layer(case, device)
    hidden, (place, is_kept), regular = layer.convolve(), layer.find_exceptions(), layer.list_regular()
    generator = torch.Generator().manual_seed(1)
    # The CUDA kernels' sums are exact here: small integers.
    upstream = torch.randint(-9, 9, hidden.shape, generator=generator).to(hidden)
    is_exception = torch.zeros(hidden.shape[:3], device=device)
    is_exception.scatter_add_(2, (place * is_kept), is_kept.to(is_exception))
    upstream *= ((is_exception > 0) | regular)[..., None]
    logits = (case.batch, case.heads, case.rows, layer.columns)
    of_logits = torch.randint(-9, 9, logits, generator=generator).to(hidden) * case.is_residual
    into = (hidden * upstream).sum() + (of_logits * (layer.row[..., None] + layer.key[:, :, None])).sum()
    expected = torch.autograd.grad(into, (layer.row, layer.key, layer.w1, layer.b1))

    of_terms, p = upstream * regular[..., None], layer.padding
    channels = torch.tensor(list_tile_widths())
    sums = torch.zeros(case.batch, case.rows, WIDTH + HEADS, device=device)
    of_columns = torch.zeros(case.batch, layer.columns, WIDTH + HEADS, device=device)
    wide = F.pad(of_terms, (0, WIDTH - case.width))[..., channels]
    sums[..., :WIDTH], of_columns[..., :WIDTH] = wide.sum(2), wide.sum(1)[:, p:]
    sums[..., WIDTH : WIDTH + case.heads] = of_logits.sum(3).mT
    of_columns[..., WIDTH : WIDTH + case.heads] = of_logits.sum(2).mT
    edge = upstream.gather(2, (place * is_kept)[..., None].expand(-1, -1, -1, case.width)) * is_kept[..., None]
    edge = F.pad(edge, (0, WIDTH - case.width)).float()
    weights = torch.randn(1, 2 * case.taps * HEADS * WIDTH, generator=generator).to(device)
    with launch_context(layer.row):
        found = differentiate_gates(
            layer.problem, layer.bias, layer.b2.detach(), GateSums(sums, of_columns, edge, weights)
        )
    shape = layer.problem.shape
    nothing = weights.new_zeros(1, 0), weights.new_zeros(1, case.width)
    ((scores, _, w2, _),) = unpack_gradients(shape, unpack_weights(weights, shape), *nothing, (torch.float64,) * 4)
    torch.testing.assert_close(found.w1[:, : case.heads], scores, rtol=0, atol=0)
    torch.testing.assert_close(found.w2, w2, rtol=0, atol=0)
    assert not found.b2.any()
    # Sums of n terms in float64 err by at most n roundings of the sum of their sizes, in both orders.
    size = float(upstream.abs().max()) * float(layer.w1.abs().max())
    count = case.taps * case.width * max(case.rows, layer.columns)
    for mine, true in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=2 * count**2 * FLOAT64 * size)
    count, size = case.rows * layer.columns, float(upstream.abs().max()) * (2 * abs(case.origin) + 9)
    largest = 2 * count**2 * FLOAT64 * size
    torch.testing.assert_close(found.w1[:, case.heads :], expected[2][:, case.heads :], rtol=0, atol=largest)
    torch.testing.assert_close(found.b1, expected[3], rtol=0, atol=0)  # sums of small integers


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fragments_are_those_of_packed_weights(dtype: torch.dtype, device: torch.device) -> None:
    for case in (CASES[0], CASES[4], *CASES[6:]):
        layer = Layer(case, device)
        w1, b1, w2, b2 = (x.detach().float() for x in (layer.w1 * 40_000, layer.b1, layer.w2 * 40_000, layer.b2))
        bias = GateBias(layer.row.detach(), layer.key.detach(), w1, b1, w2, is_residual=True)
        problem = replace(layer.problem, dtype=dtype)
        with launch_context(layer.row):
            found = build_gate_operands(problem, bias, list_chunks(problem, case.chunk)[0]).fragments
        packed = pack_weights(problem.shape, [(w1[:, : case.heads], b1, w2, b2)], dtype)
        for mine, true in zip(found, build_fragments(packed.w1, packed.w2, WIDTH), strict=True):
            assert mine.dtype == true.dtype
            torch.testing.assert_close(mine, true, rtol=0, atol=0)
