"""The softmax with what is joined to it, alone and from its own logits, against float64.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cdape_attention import chunks
from kernels.cdape_attention.attend import _attend_bwd_kernel, _attend_fwd_kernel
from kernels.cdape_attention.chunks import UNBOUNDED, Chunk, Problem, attend_launch
from kernels.cdape_attention.configs import attend_tile
from kernels.runtime import on_device_of
from tools.rounding import assert_rounding_alone

pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")

BATCH, HEADS = 2, 3
CASES = [
    # rows, offset, window, d, rows per chunk, columns of a block
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
"""Windows, offsets and chunks that end with a block, and inside one."""


def _maps(
    device: str, rows: int, offset: int, window: int | None, dim: int, size: int
) -> tuple[Problem, Chunk, Tensor, Tensor]:
    """The last chunk, which rows of it see which columns [R, C], and its logits, NaN where a row does not look."""
    empty = torch.empty(0)
    problem = Problem(
        empty, empty, empty, empty, empty, rows, offset, UNBOUNDED if window is None else window, torch.float32
    )
    *_, chunk = chunks.chunks(problem, size)
    distance = chunk.position + torch.arange(chunk.rows)[:, None] - torch.arange(chunk.left, chunk.right)
    seen = (distance >= 0) & (distance < problem.window)
    logits = 3 * torch.randn(BATCH, HEADS, *seen.shape)
    return problem, chunk, seen.to(device), logits.masked_fill(~seen, float("nan")).to(device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_softmax_and_its_gradient(
    case: tuple[int, int, int | None, int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *case, columns = case
    monkeypatch.setattr(chunks, "attend_tile", lambda *args: replace(attend_tile(*args), block_m=16, block_n=columns))
    problem, chunk, seen, logits = _maps(device, *case)
    rows, dim = problem.rows, case[3]
    v = torch.randn(BATCH, HEADS, chunk.right + 3, dim).to(device)
    into = torch.randn(BATCH, HEADS, rows, dim).to(device)
    leaf = logits.cpu().double().masked_fill(~seen.cpu(), float("-inf")).requires_grad_()
    right, upstream = (x.cpu().double() for x in (chunk.of_columns(v), chunk.of_rows(into)))

    def compute() -> dict[str, Tensor]:
        probabilities = leaf.softmax(-1)
        output = probabilities @ right
        (gradient,) = torch.autograd.grad(output, leaf, upstream)
        return {"output": output, "probabilities": probabilities, "gradient": gradient}

    output, statistics = torch.empty_like(into), torch.empty(2, BATCH, HEADS, rows, device=device)
    grid, options = attend_launch("attend_fwd", problem, chunk, v)
    with on_device_of(v):
        _attend_fwd_kernel[grid](
            logits, chunk.of_columns(v), chunk.of_rows(output), statistics[..., chunk.first :], **options
        )
    assert output[:, :, : chunk.first].isnan().all()
    assert statistics[..., : chunk.first].isnan().all()

    probabilities = torch.empty_like(logits)
    grid, options = attend_launch("attend_bwd", problem, chunk, v)
    gradient = logits.clone()
    arguments = (gradient, probabilities, chunk.of_columns(v), chunk.of_rows(into), statistics[..., chunk.first :])
    with on_device_of(v):
        _attend_bwd_kernel[grid](*arguments, **options)
    assert (probabilities[..., ~seen] == 0).all()
    found = {"output": chunk.of_rows(output), "probabilities": probabilities}
    assert_rounding_alone(found | {"gradient": gradient.masked_fill(~seen, 0)}, compute, torch.float32)


def test_half_types_keep_their_products_in_float32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal probabilities: neither they nor their sum may round at float16, where 2049 is 2048."""
    monkeypatch.setattr(chunks, "attend_tile", lambda *args: replace(attend_tile(*args), block_n=256))
    problem, chunk, seen, logits = _maps(device, 3, 2100, None, 16, 3)
    logits = logits.masked_fill(seen, 0.0)
    v = torch.ones(BATCH, HEADS, chunk.right, 16, dtype=torch.float16, device=device)
    output = torch.empty(BATCH, HEADS, 3, 16, dtype=v.dtype, device=device)
    statistics = torch.empty(2, BATCH, HEADS, 3, device=device)
    grid, options = attend_launch("attend_fwd", replace(problem, dtype=v.dtype), chunk, v)
    with on_device_of(v):
        _attend_fwd_kernel[grid](logits, v, output, statistics, **options)
    assert (output == 1).all()
    assert (statistics[1] == torch.tensor([2101.0, 2102.0, 2103.0], device=device)).all()
