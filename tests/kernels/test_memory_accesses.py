"""Kernels access only their arguments, and no element that another program writes in the same launch."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from memory_watch import OUTSIDE, SHARED, UNORDERED, watch_memory
from torch import Tensor

from megatron.kernels.bias.fire import fire_bias
from megatron.kernels.bias.gate_sums import sum_gates
from megatron.kernels.bias.toeplitz import toeplitz_bias
from megatron.kernels.biased_attention import configs
from megatron.kernels.biased_attention.op import biased_attention
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.op import cdape_attention
from megatron.kernels.runtime import launch_context

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")


@triton.jit
def _planted_kernel(x, y, SHIFT: tl.constexpr, RELOADS: tl.constexpr, HAS_BARRIER: tl.constexpr):
    i = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + i, tl.load(x + i + SHIFT))
    if HAS_BARRIER:
        tl.debug_barrier()
    if RELOADS:
        tl.store(x + i, tl.load(y + i))


@pytest.mark.parametrize(
    ("shift", "reloads", "has_barrier", "fault"),
    [
        (0, False, False, None),
        (1, False, False, OUTSIDE),
        (4, True, True, SHARED),
        (0, True, False, UNORDERED),
        (0, True, True, None),
    ],
)
def test_planted_faults_are_found(shift: int, reloads: bool, has_barrier: bool, fault: str | None) -> None:
    x, y = torch.zeros(12), torch.zeros(8)
    x = x if shift == 4 else x[4:].clone()
    with launch_context(x):
        _planted_kernel[(1,)](x, y, shift, reloads, has_barrier)  # records plans, which have no barriers
    with watch_memory() as watch, launch_context(x):
        for _ in range(2):  # the second launch replays the plans of the first
            _planted_kernel[(2,)](x, y, shift, reloads, has_barrier)
            assert {kind for _, kind in watch.faults} == ({fault} if fault else set())


def _draw(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).requires_grad_()


STARTS = torch.tensor([[0] * 20 + [20] * 17, [0] * 3 + [3] * 34], dtype=torch.int32)


def _attend_with_bias() -> Tensor:
    q, k, v = (_draw(2, 2, length, 24) for length in (37, 41, 41))
    table, weight = _draw(2, 50), _draw(2, 50)
    outputs = biased_attention(q, k, v, table, offset=4), biased_attention(q, k, v, table, weight, offset=4, window=9)
    return sum((x.sum() for x in outputs), biased_attention(q, k, v, key_bias=_draw(2, 2, 41), offset=4).sum())


def _attend_to_documents() -> Tensor:
    q, k, v = (_draw(2, 2, 37, 16) for _ in range(3))
    return biased_attention(q, k, v, _draw(2, 37), document_starts=STARTS, sinks=_draw(2)).sum()


def _process_scores(**options: object) -> Tensor:
    tensors = [_draw(2, 3, 37, 16) for _ in range(3)]
    weights = _draw(5, 6, 1, 3), _draw(5), _draw(3, 5, 1, 3), _draw(3)
    return cdape_attention(CdapeArgs(*tensors, _draw(3, 37), *weights, **options), chunk=20).sum()


def _build_biases() -> Tensor:
    fire = (_draw(1).abs(), _draw(1).abs(), _draw(7, 1), _draw(7), _draw(3, 7), _draw(3))
    rows, columns = sum_gates(_draw(2, 3, 37), 20)
    matrices = toeplitz_bias(_draw(3, 40), 19, 37, offset=18), fire_bias(*fire, 19, 37, half_length=8, offset=18)
    return matrices[0].sum() + matrices[1].sum() + rows.sum() + columns.sum()


@pytest.mark.parametrize(
    ("compute", "kernels"),
    [
        (_attend_with_bias, 4),
        (_attend_to_documents, 4),
        (_process_scores, 8),
        (lambda: _process_scores(window=7), 8),
        (lambda: _process_scores(document_starts=STARTS), 8),
        (lambda: _process_scores(head_map=_draw(3, 3)), 8),
        (_build_biases, 6),
    ],
    ids=["bias", "documents", "processor", "window", "processor of documents", "head map", "matrices"],
)
def test_no_access_is_wrong(compute: Callable[[], Tensor], kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "PARTIAL_SUMS", 4)  # a program adds several blocks of rows to its sums
    with watch_memory() as watch:
        compute().backward()
    assert not watch.faults
    assert len(watch.launched) >= kernels, watch.launched
