"""The CUDA kernel for P and dL, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: those of the logits, and half a unit in the last place for each value that the kernel rounds.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_emulation import (
    NO_ERRORS,
    SHAPES,
    Launcher,
    Shape,
    build_logit_inputs,
    compute_true_logits,
    find_seen,
)
from torch import Tensor

from kernels.cdape_attention import mixer, mixer_forward
from kernels.cdape_attention.logit_gradient import AttendedChunk, LogitGradients, differentiate_softmax
from kernels.cdape_attention.mixer_forward import LogitInputs
from kernels.cuda.emulate import Faults, find_compiler

ROUNDING = 2.0**-8
"""Relative to a number, more than half a unit in the last place of bfloat16."""

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def attend(inputs: LogitInputs, shape: Shape, seed: int = 0) -> AttendedChunk:
    """Random values and gradients, and what the softmax makes of the true logits. Longer tensors hold other rows."""
    generator = torch.Generator().manual_seed(seed + 1)
    batch, heads, rows, columns = shape.batch, shape.heads, shape.rows, shape.columns
    values = torch.randn(batch, heads, columns + 5, 64, generator=generator).bfloat16()
    doutput = torch.randn(batch, heads, rows + 2, 64, generator=generator).bfloat16()[:, :, :rows]
    logits = compute_true_logits(inputs, shape)[0].masked_fill(~find_seen(shape), float("-inf"))
    maximum = logits.amax(-1)
    exact = logits.softmax(-1) @ values[:, :, :columns].double()
    stats = torch.full((2, batch, heads, rows + 2), torch.nan)
    output, residue = (torch.zeros(batch, heads, rows + 2, 64).bfloat16()[:, :, :rows] for _ in range(2))
    output.copy_(exact)
    residue.copy_(exact - output.double())
    stats[0, ..., :rows] = maximum / math.log(2)
    stats[1, ..., :rows] = (logits - maximum[..., None]).exp().sum(-1)
    return AttendedChunk(values, output, residue, doutput, stats[..., :rows])


def run(inputs: LogitInputs, attended: AttendedChunk, launcher: Launcher) -> tuple[LogitGradients, Tensor, Faults]:
    sums = torch.full_like(attended.stats[0], torch.nan)
    sums = torch.full((*sums.shape[:2], sums.shape[2] + 2), torch.nan)[..., : sums.shape[2]]
    bases = [x._base if x._base is not None else x for x in (*attended, sums)]
    builders = ["build_group_table", "build_bias", "exchange_fragments"]
    with launcher.watch([inputs.queries, inputs.keys, *bases], mixer_forward, builders):
        found = differentiate_softmax(inputs, attended, sums, launcher)
    return found, sums, launcher.emulator.get_faults()


def find_excess(
    found: LogitGradients, sums: Tensor, inputs: LogitInputs, attended: AttendedChunk, shape: Shape
) -> float:
    """The largest error relative to its bound."""
    seen = find_seen(shape)
    true_logits, doubt = compute_true_logits(inputs, shape)
    logits = true_logits.masked_fill(~seen, float("-inf"))
    probabilities = logits.softmax(-1)
    dprobabilities = attended.doutput.double() @ attended.values[:, :, : shape.columns].double().mT
    means = (probabilities * dprobabilities).sum(-1)
    size = attended.doutput.double().norm(dim=-1) * attended.output.double().norm(dim=-1)
    means_bound = size * 2.0**-14
    gradient = probabilities * (dprobabilities - means[..., None])
    relative = doubt + ROUNDING
    bound = gradient.abs() * relative + probabilities * means_bound[..., None] + 1e-6
    found_gradient = found.dlogits.permute(0, 2, 4, 1, 3).flatten(1, 2)
    pairs = (
        (found.probabilities[..., seen], probabilities[..., seen], (probabilities * relative + 1e-7)[..., seen]),
        (found_gradient[:, : shape.heads][..., seen], gradient[..., seen], bound[..., seen]),
        (found_gradient[:, shape.heads :][..., seen], torch.zeros(()).double(), torch.tensor(1e-30).double()),
        (sums, means, means_bound),
    )
    ratios = [((ours.double() - true).abs() / limit) for ours, true, limit in pairs if ours.numel()]
    return max(float(ratio.nan_to_num(torch.inf).max()) for ratio in ratios)


@settings(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000), residual_bias=st.booleans())
def test_maps_are_those_of_float64_and_no_access_is_wrong(shape: Shape, seed: int, residual_bias: bool) -> None:
    inputs = build_logit_inputs(shape, seed, residual_bias=residual_bias)
    attended = attend(inputs, shape, seed)
    found, sums, faults = run(inputs, attended, Launcher(mixer.FOLDER))
    assert faults.errors == NO_ERRORS, faults
    assert find_excess(found, sums, inputs, attended, shape) <= 1


def test_the_order_of_warps_changes_no_bit() -> None:
    shape = Shape(1, 12, 32, 72, 0)
    inputs = build_logit_inputs(shape)
    attended = attend(inputs, shape)
    found, _, _ = run(inputs, attended, Launcher(mixer.FOLDER))
    again, _, faults = run(inputs, attended, Launcher(mixer.FOLDER, backwards=True))
    assert faults.errors == NO_ERRORS
    seen = find_seen(shape)
    assert torch.equal(found.probabilities[..., seen], again.probabilities[..., seen])
    assert torch.equal(found.dlogits.transpose(2, 3)[:, seen], again.dlogits.transpose(2, 3)[:, seen])


def test_logits_are_those_of_the_forward_pass() -> None:
    """A softmax's statistics hold for the logits that they were computed from, not for others that round otherwise."""
    shape = Shape(1, 12, 32, 40, 8)
    inputs = build_logit_inputs(shape)
    attended, launcher = attend(inputs, shape), Launcher(mixer.FOLDER)
    found, _, _ = run(inputs, attended, launcher)
    builders = ["build_group_table", "build_bias", "exchange_fragments"]
    with launcher.watch([inputs.queries, inputs.keys], mixer_forward, builders):
        logits = mixer_forward.compute_logits(inputs, mixer_forward.NARROW, launcher)
    norms = attended.stats[0] + attended.stats[1].log2()
    expected = torch.exp2(logits * (1 / math.log(2)) - norms[..., None]).bfloat16()
    is_same = (found.probabilities == expected)[..., find_seen(shape)]
    assert is_same.float().mean() > 0.99  # exponentials of two libraries


def test_shared_memory_has_few_bank_conflicts() -> None:
    shape = Shape(1, 16, 32, 96, 0)
    inputs = build_logit_inputs(shape)
    _, _, faults = run(inputs, attend(inputs, shape), Launcher(mixer.FOLDER))
    assert faults.clocks < 1.1 * faults.accesses


FAULTS = {
    "a wrong diagonal": ("t == g / 2;", "t == g % 4;"),
    "a wrong copy of the bias": ("g % 4 * copy_bytes", "(g + 1) % 4 * copy_bytes"),
    "no residue": ("sums[0].tile[tile][n][2 * n] + sums[1].tile[tile][n][2 * n]", "sums[0].tile[tile][n][2 * n]"),
    "a wrong column": ("t * 4 + (column + y) <=", "t * 4 + (column + y) <"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    shutil.copytree(mixer.FOLDER, folder)
    header = folder / "logit_gradient.h"
    source, (right, wrong) = header.read_text(encoding="utf-8"), FAULTS[name]
    assert source.count(right) == 1
    header.write_text(source.replace(right, wrong), encoding="utf-8")
    shape = Shape(1, 16, 32, 64, 0)
    inputs = build_logit_inputs(shape)
    attended = attend(inputs, shape)
    found, sums, faults = run(inputs, attended, Launcher(folder))
    assert faults.errors != NO_ERRORS or find_excess(found, sums, inputs, attended, shape) > 1
