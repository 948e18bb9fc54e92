"""Softmax fused with adjacent operations, alone and from its own logits, compared with float64.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cdape_calls import build_problem
from torch import Tensor

from megatron.kernels.cdape_attention import chunks, head_products, triton_mixer
from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32, CdapeProblem, Chunk
from megatron.kernels.cdape_attention.configs import choose_attend_tile, choose_heads_tile
from megatron.kernels.cdape_attention.head_products import AttentionOutput, average_values
from megatron.kernels.cdape_attention.triton_mixer import compute_scores, differentiate_softmax
from megatron.kernels.runtime import launch_context
from tools.tolerances import assert_within_rounding

pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")

BATCH, HEADS = 2, 3
CASES = [
    # rows, offset, window, d, rows per chunk, columns per block
    (18, 0, None, 8, 18, 16),
    (33, 15, None, 10, 18, 16),
    (48, 16, 16, 16, 32, 16),
    (35, 0, None, 16, 35, 32),
    (35, 30, 21, 80, 24, 16),
    (35, 30, 21, 80, 24, 32),
    (19, 3, 5, 20, 19, 16),
    (18, 60, 34, 128, 18, 32),
    (17, 0, 1, 8, 17, 16),
    (1, 34, None, 64, 1, 16),
    (1, 70, 33, 48, 1, 32),
]
"""Windows, offsets and chunks that end at a block boundary and within a block."""


def _sizes(columns: int) -> Callable[..., Callable[..., object]]:
    """Return a tile table with other block sizes."""
    return lambda table: lambda *args: replace(table(*args), block_m=16, block_n=columns)


def _maps(
    device: str, rows: int, offset: int, window: int | None, size: int
) -> tuple[CdapeProblem, Chunk, Tensor, Tensor]:
    """Return a problem, its last chunk, the visible columns of its rows [R, C], and its logits, NaN where invisible."""
    problem = build_problem(rows, offset, NO_WINDOW_INT32 if window is None else window)
    *_, chunk = chunks.list_chunks(problem, size)
    distance = chunk.position + torch.arange(chunk.rows)[:, None] - torch.arange(chunk.left, chunk.right)
    seen = (distance >= 0) & (distance < problem.window)
    logits = 3 * torch.randn(BATCH, HEADS, *seen.shape)
    return problem, chunk, seen.to(device), logits.masked_fill(~seen, float("nan")).to(device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_softmax_and_its_gradient(
    case: tuple[int, int, int | None, int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *case, columns = case
    monkeypatch.setattr(head_products, "choose_attend_tile", _sizes(columns)(choose_attend_tile))
    monkeypatch.setattr(triton_mixer, "choose_heads_tile", _sizes(columns)(choose_heads_tile))
    problem, chunk, seen, logits = _maps(device, *case[:3], case[4])
    rows, dim = problem.rows, case[3]
    v = torch.randn(BATCH, HEADS, chunk.right + 3, dim).to(device)
    into = torch.randn(BATCH, HEADS, rows, dim).to(device)
    leaf = logits.cpu().double().masked_fill(~seen.cpu(), float("-inf")).requires_grad_()
    right, upstream = (x.cpu().double() for x in (chunk.slice_columns(v), chunk.slice_rows(into)))

    def compute() -> dict[str, Tensor]:
        probabilities = leaf.softmax(-1)
        output = probabilities @ right
        (gradient,) = torch.autograd.grad(output, leaf, upstream)
        return {"output": output, "probabilities": probabilities, "gradient": gradient}

    output, statistics = torch.empty_like(into), torch.empty(2, BATCH, HEADS, rows, device=device)
    residue = torch.empty_like(into)
    with launch_context(v):
        average_values(problem, chunk, logits, v, AttentionOutput(output, statistics, residue))
    assert output[:, :, : chunk.first].isnan().all()
    assert (chunk.slice_rows(residue) == 0).all()  # of float32
    assert statistics[..., : chunk.first].isnan().all()

    last = torch.empty(BATCH, *seen.shape, 8, device=device)
    probabilities, sums = torch.empty_like(logits), torch.empty_like(statistics[0])
    with launch_context(v):
        differentiate_softmax(problem, chunk, logits, v, into, (statistics, sums), (probabilities, last))
    probabilities.masked_fill_(~seen, 0)
    gradient = last.movedim(-1, 1).masked_fill(~seen, 0)
    assert (gradient[:, HEADS:] == 0).all()
    found = {"output": chunk.slice_rows(output), "probabilities": probabilities, "gradient": gradient[:, :HEADS]}
    assert_within_rounding(found, compute, torch.float32)


@pytest.mark.parametrize("heads", [1, 11, 16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_heads_last_and_padded_with_zeros(
    case: tuple[int, int, int | None, int, int, int], heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *case, columns = case
    monkeypatch.setattr(triton_mixer, "choose_heads_tile", _sizes(columns)(choose_heads_tile))
    problem, chunk, seen, _ = _maps(device, *case[:3], case[4])
    q = torch.randn(BATCH, heads, problem.rows, case[3]).to(device)
    k = torch.randn(BATCH, heads, chunk.right + 3, case[3]).to(device)
    with launch_context(q):
        scores = compute_scores(problem, chunk, q, k).movedim(-1, 1)[..., seen]
    assert scores.shape[1] % 8 == 0
    assert (scores[:, heads:] == 0).all()
    left, right = (x.cpu().double() for x in (chunk.slice_rows(q), chunk.slice_columns(k)))
    assert_within_rounding(
        {"scores": scores[:, :heads]},
        lambda: {"scores": (left @ right.transpose(-1, -2))[..., seen.cpu()]},
        torch.float32,
    )


def test_half_types_keep_their_products_in_float32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal probabilities: neither they nor their sum may be rounded to float16, where 2049 becomes 2048."""
    monkeypatch.setattr(
        head_products, "choose_attend_tile", lambda *args: replace(choose_attend_tile(*args), block_n=256)
    )
    problem, chunk, seen, logits = _maps(device, 3, 2100, None, 3)
    logits = logits.masked_fill(seen, 0.0)
    v = torch.ones(BATCH, HEADS, chunk.right, 16, dtype=torch.float16, device=device)
    output = torch.empty(BATCH, HEADS, 3, 16, dtype=v.dtype, device=device)
    residue = torch.empty_like(output)
    statistics = torch.empty(2, BATCH, HEADS, 3, device=device)
    problem = replace(problem, dtype=v.dtype)
    with launch_context(v):
        average_values(problem, chunk, logits, v, AttentionOutput(output, statistics, residue))
    assert (output == 1).all()
    assert (residue == 0).all()
    assert (statistics[1] == torch.tensor([2101.0, 2102.0, 2103.0], device=device)).all()
