"""The forward mixer's CUDA kernels, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: half a unit in the last place for each value that the kernels round.
"""

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
from kernels.cdape_attention.mixer_forward import KERNELS, LogitInputs, compute_logits
from kernels.cuda.emulate import Faults, find_compiler
from kernels.cuda.kernel import CudaKernel

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def run(inputs: LogitInputs, kernel: CudaKernel, launcher: Launcher) -> tuple[Tensor, Faults]:
    """The logits, and what the emulator counted. The kernel may access only what it is given."""
    builders = ["build_group_table", "build_bias", "exchange_fragments"]
    with launcher.watch([inputs.queries, inputs.keys], mixer_forward, builders):
        logits = compute_logits(inputs, kernel, launcher)
    return logits, launcher.emulator.get_faults()


def is_right(found: Tensor, inputs: LogitInputs, shape: Shape) -> bool:
    true, bound = compute_true_logits(inputs, shape)
    return bool(((found.double() - true).abs() <= bound)[..., find_seen(shape)].all())


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
@settings(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000), residual_bias=st.booleans())
def test_logits_are_those_of_float64_and_no_access_is_wrong(
    kernel: CudaKernel, shape: Shape, seed: int, residual_bias: bool
) -> None:
    inputs = build_logit_inputs(shape, seed, residual_bias=residual_bias)
    found, faults = run(inputs, kernel, Launcher(mixer.FOLDER))
    assert faults.errors == NO_ERRORS, faults
    assert is_right(found, inputs, shape)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_the_order_of_warps_changes_no_bit(kernel: CudaKernel) -> None:
    shape = Shape(1, 12, 32, 72, 0)
    inputs = build_logit_inputs(shape)
    found, _ = run(inputs, kernel, Launcher(mixer.FOLDER))
    again, faults = run(inputs, kernel, Launcher(mixer.FOLDER, backwards=True))
    assert faults.errors == NO_ERRORS
    seen = find_seen(shape)
    assert torch.equal(found[..., seen], again[..., seen])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_shared_memory_has_few_bank_conflicts(kernel: CudaKernel) -> None:
    _, faults = run(build_logit_inputs(Shape(1, 16, 32, 96, 0)), kernel, Launcher(mixer.FOLDER))
    assert faults.clocks < 1.1 * faults.accesses


def test_large_numbers_saturate() -> None:
    shape = Shape(1, 9, 17, 16, 0)
    inputs = build_logit_inputs(shape)
    inputs = inputs._replace(contributions=inputs.contributions * 1e6, queries=inputs.queries * 1e5)
    found, _ = run(inputs, KERNELS[90], Launcher(mixer.FOLDER))
    assert found[..., find_seen(shape)].isfinite().all()


FAULTS = {
    "a missing barrier": (
        "logits.h",
        "mix<false>(st, c, first);\n    barrier(memory);\n",
        "mix<false>(st, c, first);\n",
    ),
    "a wrong lane": ("logits.h", "select(g % 2 == 0, u32(0x3c00u)", "select(g % 2 == 1, u32(0x3c00u)"),
    "a wrong edge": ("logits.h", "16 * row_tile, jj - BEGIN, step", "16 * row_tile + 1, jj - BEGIN, step"),
    "a wrong distance": ("mixer_forward.h", "4 + r - y", "5 + r - y"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    shutil.copytree(mixer.FOLDER, folder)
    file, right, wrong = FAULTS[name]
    header = folder / file
    source = header.read_text(encoding="utf-8")
    assert source.count(right) == 1
    header.write_text(source.replace(right, wrong), encoding="utf-8")
    shape = Shape(1, 16, 32, 64, 0)
    inputs = build_logit_inputs(shape)
    found, faults = run(inputs, KERNELS[90], Launcher(folder))
    assert faults.errors != NO_ERRORS or not is_right(found, inputs, shape)
