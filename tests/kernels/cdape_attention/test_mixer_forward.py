"""The forward mixer's CUDA kernels, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: half a unit in the last place for each value that the kernels round.
"""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_emulation import NO_ERRORS, PADDING, SHAPES, TAPS, Launcher, Shape, draw_call, find_seen
from torch import Tensor
from torch.nn.functional import pad

from kernels.cdape_attention import mixer, mixer_forward
from kernels.cdape_attention.mixer_forward import KERNELS, LogitInputs, compute_logits
from kernels.cuda.emulate import Faults, find_compiler
from kernels.cuda.kernel import CudaKernel

ROUNDING = 2.0**-11
"""Relative to a number, half a unit in the last place of float16."""
SLOPE = float(torch.tensor(0.01, dtype=torch.float16))
TINY = 2.0**-20
"""Errors of sums in float32."""

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def build_inputs(shape: Shape, seed: int = 0, *, residual_bias: bool = True) -> LogitInputs:
    call = draw_call(shape, torch.Generator().manual_seed(seed))
    table = call.bias if residual_bias else call.bias[:, :0]
    bias = (call.contributions, call.edge, table)
    return LogitInputs(call.queries, call.keys, *bias, call.weights, call.weight_shape, shape.position)


def run(inputs: LogitInputs, kernel: CudaKernel, launcher: Launcher) -> tuple[Tensor, Faults]:
    """The logits, and what the emulator counted. The kernel may access only what it is given."""
    builders = ["build_group_table", "build_bias", "exchange_fragments"]
    with launcher.watch([inputs.queries, inputs.keys], mixer_forward, builders):
        logits = compute_logits(inputs, kernel, launcher)
    return logits, launcher.emulator.get_faults()


def compute_truth(inputs: LogitInputs, shape: Shape) -> tuple[Tensor, Tensor]:
    """Logits in float64, and by how much rounding may change them."""
    heads, width, columns = shape.heads, shape.width, shape.columns
    hidden_columns = columns + PADDING
    scores = torch.einsum("bhid,bhjd->bhij", inputs.queries.double(), inputs.keys[:, :, :columns].double())
    scores = torch.where(find_seen(shape), scores, 0.0)
    w1, w2 = inputs.weights.w1[:, :heads, :width].double(), inputs.weights.w2[:, :width, :heads].double()
    distance = torch.arange(shape.rows)[:, None] + shape.position - torch.arange(hidden_columns)
    hidden = inputs.contributions.double()[(distance + PADDING).clamp(min=0)]
    hidden[:, :PADDING] = inputs.edge.double()
    hidden = hidden.expand(shape.batch, -1, -1, -1).clone()
    size = hidden.abs()
    wide_scores = pad(scores, (PADDING, 2 * PADDING))
    for tap in range(TAPS):
        taken = wide_scores[..., tap : tap + hidden_columns]
        hidden += torch.einsum("bhij,hd->bijd", taken, w1[tap])
        size += torch.einsum("bhij,hd->bijd", taken.abs(), w1[tap].abs())
    active = torch.where(hidden > 0, hidden, SLOPE * hidden)
    # Both factors, U and the scores, were rounded, then the hidden value, and what the slope made of it.
    doubt = (2 * size + 2 * hidden.abs()) * ROUNDING + TINY
    logits, bound = scores.clone(), scores.abs() * ROUNDING
    wide, wide_doubt = pad(active, (0, 0, PADDING, 0)), pad(doubt, (0, 0, PADDING, 0))
    corrections = torch.zeros_like(scores)
    for tap in range(TAPS):
        corrections += torch.einsum("bijd,dh->bhij", wide[:, :, tap : tap + columns], w2[tap])
        bound += torch.einsum("bijd,dh->bhij", wide_doubt[:, :, tap : tap + columns], w2[tap].abs())
        part = torch.einsum("bijd,dh->bhij", wide[:, :, tap : tap + columns].abs(), w2[tap].abs())
        bound += part * ROUNDING  # what a run passes on is rounded apart
    logits += corrections
    bound += logits.abs() * ROUNDING + TINY
    logits += inputs.weights.b2[:heads, None, None].double()
    if inputs.bias_table.shape[1]:
        logits += inputs.bias_table.double()[:, distance[:, :columns].clamp(min=0)]
    return logits, bound + logits.abs() * TINY


def is_right(found: Tensor, inputs: LogitInputs, shape: Shape) -> bool:
    true, bound = compute_truth(inputs, shape)
    return bool(((found.double() - true).abs() <= bound)[..., find_seen(shape)].all())


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
@settings(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000), residual_bias=st.booleans())
def test_logits_are_those_of_float64_and_no_access_is_wrong(
    kernel: CudaKernel, shape: Shape, seed: int, residual_bias: bool
) -> None:
    inputs = build_inputs(shape, seed, residual_bias=residual_bias)
    found, faults = run(inputs, kernel, Launcher(mixer.FOLDER))
    assert faults.errors == NO_ERRORS, faults
    assert is_right(found, inputs, shape)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_the_order_of_warps_changes_no_bit(kernel: CudaKernel) -> None:
    shape = Shape(1, 12, 32, 72, 0)
    inputs = build_inputs(shape)
    found, _ = run(inputs, kernel, Launcher(mixer.FOLDER))
    again, faults = run(inputs, kernel, Launcher(mixer.FOLDER, backwards=True))
    assert faults.errors == NO_ERRORS
    seen = find_seen(shape)
    assert torch.equal(found[..., seen], again[..., seen])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_shared_memory_has_few_bank_conflicts(kernel: CudaKernel) -> None:
    _, faults = run(build_inputs(Shape(1, 16, 32, 96, 0)), kernel, Launcher(mixer.FOLDER))
    assert faults.clocks < 1.1 * faults.accesses


def test_large_numbers_saturate() -> None:
    shape = Shape(1, 9, 17, 16, 0)
    inputs = build_inputs(shape)
    inputs = inputs._replace(contributions=inputs.contributions * 1e6, queries=inputs.queries * 1e5)
    found, _ = run(inputs, KERNELS[90], Launcher(mixer.FOLDER))
    assert found[..., find_seen(shape)].isfinite().all()


FAULTS = {
    "a missing barrier": ("    mix<false>(st, c, first);\n    barrier(memory);\n", "    mix<false>(st, c, first);\n"),
    "a wrong lane": ("select(g % 2 == 0, u32(0x3c00u)", "select(g % 2 == 1, u32(0x3c00u)"),
    "a wrong edge": ("16 * row_tile, jj - BEGIN, step", "16 * row_tile + 1, jj - BEGIN, step"),
    "a wrong distance": ("4 + r - y", "5 + r - y"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    shutil.copytree(mixer.FOLDER, folder)
    header = folder / "mixer_forward.h"
    source, (right, wrong) = header.read_text(encoding="utf-8"), FAULTS[name]
    assert right in source
    header.write_text(source.replace(right, wrong), encoding="utf-8")
    shape = Shape(1, 16, 32, 64, 0)
    inputs = build_inputs(shape)
    found, faults = run(inputs, KERNELS[90], Launcher(folder))
    assert faults.errors != NO_ERRORS or not is_right(found, inputs, shape)
