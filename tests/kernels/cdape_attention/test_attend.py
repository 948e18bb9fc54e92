"""The softmax with what is joined to it, alone and from its own logits, against float64.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cdape_attention import chunks
from kernels.cdape_attention.attend import attend, attend_backward
from kernels.cdape_attention.chunks import UNBOUNDED, Chunk, Problem, attend_launch
from kernels.cdape_attention.configs import attend_blocks

pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")

BATCH, HEADS = 2, 3
CASES = [
    # rows, offset, window, d, rows per chunk
    (40, 0, None, 8, 40),
    (33, 15, None, 10, 20),
    (48, 16, 16, 16, 32),
    (35, 30, 21, 80, 24),
    (37, 3, 5, 20, 37),
    (18, 60, 34, 128, 18),
    (20, 0, 1, 8, 20),
    (1, 70, None, 64, 1),
    (1, 70, 33, 48, 1),
]
"""Windows, offsets and chunks that end with a block of 16 or 32, and inside one."""


def _maps(rows: int, offset: int, window: int | None, dim: int, size: int) -> tuple[Problem, Chunk, Tensor, Tensor]:
    """The last chunk, which rows of it see which columns [R, C], and its logits, NaN where a row does not look."""
    empty = torch.empty(0)
    problem = Problem(
        empty, empty, empty, empty, empty, rows, offset, UNBOUNDED if window is None else window, torch.float32
    )
    *_, chunk = chunks.chunks(problem, size)
    distance = chunk.position + torch.arange(chunk.rows)[:, None] - torch.arange(chunk.left, chunk.right)
    seen = (distance >= 0) & (distance < problem.window)
    logits = 3 * torch.randn(BATCH, HEADS, *seen.shape)
    return problem, chunk, seen, logits.masked_fill(~seen, float("nan"))


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_softmax_and_its_gradient(
    case: tuple[int, int, int | None, int, int], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(chunks, "attend_blocks", lambda *args: replace(attend_blocks(*args), rows=16, columns=columns))
    problem, chunk, seen, logits = _maps(*case)
    rows, dim = problem.rows, case[3]
    v = torch.randn(BATCH, HEADS, chunk.right + 3, dim)
    into = torch.randn(BATCH, HEADS, rows, dim)
    leaf = logits.double().masked_fill(~seen, float("-inf")).requires_grad_()
    probabilities = leaf.softmax(-1)
    expected = probabilities @ chunk.of_columns(v).double()
    (gradient,) = torch.autograd.grad(expected, leaf, chunk.of_rows(into).double())

    output, statistics = torch.empty_like(into), torch.empty(2, BATCH, HEADS, rows)
    grid, options = attend_launch("attend", problem, chunk, v)
    attend[grid](logits, chunk.of_columns(v), chunk.of_rows(output), statistics[..., chunk.first :], **options)
    close = {"atol": 2e-6 * dim**0.5, "rtol": 2e-6}
    torch.testing.assert_close(chunk.of_rows(output).double(), expected.detach(), **close)
    assert output[:, :, : chunk.first].isnan().all()
    assert statistics[..., : chunk.first].isnan().all()

    found = torch.empty_like(logits)
    grid, options = attend_launch("attend_backward", problem, chunk, v)
    attend_backward[grid](
        *(logits, found, chunk.of_columns(v), chunk.of_rows(into), statistics[..., chunk.first :]), **options
    )
    torch.testing.assert_close(found.double(), probabilities.detach(), atol=2e-7, rtol=2e-6)
    assert (found[..., ~seen] == 0).all()
    torch.testing.assert_close(logits[..., seen].double(), gradient[..., seen], **close)


def test_half_types_keep_their_products_in_float32() -> None:
    """Many equal probabilities: neither they nor their sum may round at float16, where 2049 is 2048."""
    problem, chunk, seen, logits = _maps(3, 2600, None, 16, 3)
    logits = logits.masked_fill(seen, 0.0)
    v = torch.ones(BATCH, HEADS, chunk.right, 16, dtype=torch.float16)
    output, statistics = torch.empty(BATCH, HEADS, 3, 16, dtype=v.dtype), torch.empty(2, BATCH, HEADS, 3)
    grid, options = attend_launch("attend", replace(problem, dtype=v.dtype), chunk, v)
    attend[grid](logits, v, output, statistics, **options)
    assert (output == 1).all()
    assert (statistics[1] == torch.tensor([2601.0, 2602.0, 2603.0])).all()
