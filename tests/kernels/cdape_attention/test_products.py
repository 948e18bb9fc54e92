"""Gradients of queries, keys and values from a chunk's dS and P, and sums of partial results, compared with float64.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from cdape_calls import build_problem
from torch import Tensor

from megatron.kernels.cdape_attention import head_products
from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32, CdapeProblem, Chunk, list_chunks
from megatron.kernels.cdape_attention.configs import choose_product_tile
from megatron.kernels.cdape_attention.head_products import differentiate_qkv
from megatron.kernels.runtime import launch_context
from tools.tolerances import compute_tolerance

BATCH, HEADS, SCALE = 2, 3, 0.3


@dataclass(frozen=True)
class Case:
    rows: int
    dim: int
    offset: int = 0
    window: int | None = None
    chunk: int | None = None
    documents: tuple[tuple[int, ...], ...] = ()

    def build(self, dtype: torch.dtype, device: str) -> tuple[CdapeProblem, list[Chunk], list[Tensor]]:
        """Return the problem, its chunks from the last on, and each chunk's visible columns [B, 1, R, C]."""
        problem = build_problem(self.rows, self.offset, NO_WINDOW_INT32 if self.window is None else self.window)
        starts = torch.zeros(BATCH, self.rows, dtype=torch.int32)
        if self.documents:
            lengths = [torch.tensor(each) for each in self.documents]
            each = torch.stack([(x.cumsum(0) - x).repeat_interleave(x) for x in lengths])
            starts = each[:, self.offset :].int()
        problem = replace(problem, dtype=dtype, document_starts=starts.to(device) if self.documents else None)
        chunks, seen = list(list_chunks(problem, self.chunk or self.rows))[::-1], []
        for chunk in chunks:
            row, column = chunk.position + torch.arange(chunk.rows)[:, None], torch.arange(chunk.left, chunk.right)
            is_inside = (column <= row) & (column > row - problem.window)
            first = starts[:, None, chunk.first : chunk.last, None]
            seen.append((is_inside & (column >= first)).to(device))
        return problem, chunks, seen


CASES = [
    Case(35, 8),
    Case(48, 80),
    Case(33, 24, chunk=17),
    Case(40, 16, offset=24, window=19, chunk=25),
    Case(19, 128, offset=40, window=9),
    Case(50, 16, documents=((50,), (3, 20, 1, 26)), chunk=33),
]


@pytest.fixture(params=[16, None], ids=["small tiles", "the tiles that are shipped"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles of 16 rows and columns, so that some are fully visible and some fully masked, or those that ship."""
    if request.param is not None:
        small = {"block_m": request.param, "block_n": request.param}
        monkeypatch.setattr(
            head_products, "choose_product_tile", lambda *args: replace(choose_product_tile(*args), **small)
        )


def draw(*sizes: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator).to(dtype).to(device)


def draw_partial_results(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield totals, filled with a number, and partial results: of other sizes than the totals, with strides, many."""
    for (count, rows, columns), (all_rows, all_columns) in (
        ((3, 41, 48), (40, 48)),
        ((70, 1, 130), (1, 130)),
        ((BATCH, 90, 32), (90, 20)),
        ((1, 5, 7), (9, 9)),
    ):
        total = torch.full((all_rows, 2 * all_columns), 0.75, device=device)[:, all_columns:]
        partial = draw(count, rows, 2, columns, dtype=torch.float32, device=device)[:, :, 1]
        yield total, partial


def check(found: Tensor, exact: Tensor, size: Tensor, terms: int) -> None:
    """Assert that errors are at most those of float32 sums of this size, rounded to the result's type."""
    bound = compute_tolerance(terms) * size + torch.finfo(found.dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.usefixtures("uninitialised_is_nan", "tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_sums_of_all_chunks_are_those_of_float64(case: Case, dtype: torch.dtype, device: str) -> None:
    """A single chunk overwrites the results, several add to them. Masked entries of dS and P are NaN."""
    problem, chunks, seen = case.build(dtype, device)
    columns, is_only = case.offset + case.rows, len(chunks) == 1
    scaled = draw(BATCH, HEADS, case.rows, case.dim, dtype=dtype, device=device)
    k = draw(BATCH, HEADS, columns, case.dim, dtype=dtype, device=device)
    dout = draw(case.rows, BATCH, HEADS, case.dim, dtype=dtype, device=device).permute(1, 2, 0, 3)
    dq = torch.empty_like(scaled)
    dk, dv = (torch.full((BATCH * HEADS, columns, case.dim), 0.5, device=device) for _ in "kv")
    sums = list(draw_partial_results(device))
    maps = []
    for chunk, visible in zip(chunks, seen, strict=True):
        sizes = BATCH, HEADS, chunk.rows, chunk.right - chunk.left
        dscores, probabilities = draw(2, *sizes, dtype=dtype, device=device)
        maps.append((dscores.masked_fill(~visible, torch.nan), probabilities.abs().masked_fill(~visible, torch.nan)))
        with launch_context(k):
            differentiate_qkv(
                *(problem, chunk, maps[-1], (scaled, k, dout), (dq, dk, dv), sums, SCALE), is_only=is_only
            )

    exact = torch.zeros(3, 2, BATCH, HEADS, columns, case.dim, dtype=torch.float64, device=device)
    for chunk, both in zip(chunks, maps, strict=True):
        rows, own = slice(chunk.first, chunk.last), slice(chunk.left, chunk.right)
        for index, change in enumerate((Tensor.double, lambda x: x.double().abs())):  # results and sizes of their terms
            dscores, probabilities = (change(x.nan_to_num(0.0)) for x in both)
            q, keys, upstream = (change(x) for x in (scaled[:, :, rows], k[:, :, own], dout[:, :, rows]))
            exact[0, index, :, :, rows] = SCALE * dscores @ keys
            exact[1, index, :, :, own] += dscores.mT @ q
            exact[2, index, :, :, own] += probabilities.mT @ upstream
    before = 0.0 if is_only else 0.5
    check(dq, *exact[0, :, :, :, : case.rows], columns)
    left = chunks[-1].left
    for found, (gradient, size) in zip((dk, dv), exact[1:], strict=True):
        found = found.view_as(gradient)
        assert (found[:, :, :left] == 0.5).all()
        check(found[:, :, left:], gradient[:, :, left:] + before, size[:, :, left:] + 1, case.rows + 1)
    for total, partial in sums:
        rows, columns = (min(sizes) for sizes in zip(total.shape, partial.shape[1:], strict=True))
        inside = len(chunks) * partial[:, :rows, :columns].double()
        check(total[:rows, :columns], inside.sum(0) + 1.5 * before, inside.abs().sum(0) + 1, len(inside) + 1)
        assert (total[rows:] == 0.75).all()
        assert (total[:, columns:] == 0.75).all()
        assert (total._base[:, : total.shape[1]] == 0.75).all()


@pytest.mark.usefixtures("uninitialised_is_nan")
def test_results_are_repeatable_and_do_not_depend_on_the_sums(device: str) -> None:
    """Products are equal bit for bit with other sums, and sums with other products and numbers of programs."""
    found = []
    for heads, kinds in ((HEADS, 4), (HEADS, 4), (HEADS, 1), (1, 4)):
        problem, (chunk,), _ = Case(150, 16).build(torch.float32, device)
        scaled, k, dout = (draw(BATCH, HEADS, 150, 16, dtype=torch.float32, device=device) for _ in range(3))
        maps = [draw(BATCH, HEADS, 150, 150, dtype=torch.float32, device=device) for _ in range(2)]
        scaled, k, dout, *maps = (x[:, :heads].contiguous() for x in (scaled, k, dout, *maps))
        dq, (dk, dv) = torch.empty_like(scaled), torch.empty(2, BATCH * heads, 150, 16, device=device)
        sums = list(draw_partial_results(device))[:kinds]
        inputs, gradients = (scaled, k, dout), (dq, dk, dv)
        with launch_context(k):
            differentiate_qkv(problem, chunk, (maps[0], maps[1]), inputs, gradients, sums, SCALE, is_only=True)
        by_head = [x.view(BATCH, heads, 150, 16)[:, :1] for x in gradients]
        found.append([*by_head, *(total for total, _ in sums)])
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=False))
