"""The CUDA kernel for logits, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: half a unit in the last place for each value that the kernel rounds.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_emulator import Faults, find_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_emulation import (
    CASES,
    LINEAR_CASE,
    LOCAL_EXAMPLES,
    LOCAL_SHAPES,
    NO_ERRORS,
    SHAPES,
    Case,
    Launcher,
    Shape,
    build_logit_inputs,
    compute_true_logits,
    find_inputs,
    find_seen,
    move_into_longer_call,
    plant_fault,
    unpack_operands,
)
from torch import Tensor

from megatron.kernels.cdape_attention.logit_kernels import LOGIT_KERNELS, compute_logits
from megatron.kernels.cdape_attention.mixer import ChunkInputs

WIDE_CASE = Case(16, 32, 80, torch.float16, heads=32)
FORWARD_CASES = [
    Case(32, 16, 64, torch.bfloat16),
    WIDE_CASE,
    *CASES[:2],
    Case(16, 32, 128, torch.bfloat16, 7),
]
LOCAL_FORWARD_CASES = FORWARD_CASES[:4]

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def run(inputs: ChunkInputs, case: Case, launcher: Launcher) -> tuple[Tensor, Faults]:
    """Return the logits, and the faults found by the emulator.

    The kernel may access only the tensors passed to it.
    """
    inputs = unpack_operands(inputs)
    with launcher.watch(find_inputs(inputs)):
        logits = compute_logits(inputs, case.build(LOGIT_KERNELS, inputs), launcher)
    return logits, launcher.emulator.get_faults()


def is_correct(found: Tensor, inputs: ChunkInputs, shape: Shape) -> bool:
    true, bound = compute_true_logits(inputs, shape)
    is_near = (found.double() - true[..., shape.left :]).abs() <= bound[..., shape.left :]
    return bool((is_near | ~find_seen(shape)[..., shape.left :]).all())


@pytest.mark.parametrize("case", [*FORWARD_CASES, LINEAR_CASE], ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000), residual_bias=st.booleans())
def test_logits_are_those_of_float64_and_no_access_is_wrong(
    case: Case, shape: Shape, seed: int, residual_bias: bool
) -> None:
    check_logits(case, shape, seed, residual_bias=residual_bias)


def check_logits(case: Case, shape: Shape, seed: int = 0, *, residual_bias: bool = True) -> None:
    shape = case.adapt(shape)
    inputs = build_logit_inputs(shape, seed, residual_bias=residual_bias)
    found, faults = run(inputs, case, Launcher())
    assert faults.errors == NO_ERRORS, faults
    assert is_correct(found, inputs, shape)


@pytest.mark.parametrize("case", LOCAL_FORWARD_CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=LOCAL_SHAPES, seed=st.integers(0, 1000))
def test_logits_of_windows_and_documents_are_those_of_float64(case: Case, shape: Shape, seed: int) -> None:
    check_logits(case, shape, seed)


@pytest.mark.parametrize("case", LOCAL_FORWARD_CASES, ids=str)
def test_logits_where_windows_and_documents_begin_are_those_of_float64(case: Case) -> None:
    for shape in LOCAL_EXAMPLES:
        check_logits(case, shape)


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_the_order_of_warps_changes_no_bit(case: Case) -> None:
    shape = case.adapt(Shape(1, 12, 32, 72, 0))
    inputs = build_logit_inputs(shape)
    found, _ = run(inputs, case, Launcher())
    again, faults = run(inputs, case, Launcher(backwards=True))
    assert faults.errors == NO_ERRORS
    seen = find_seen(shape)
    assert torch.equal(found.masked_fill(~seen, 0.0), again.masked_fill(~seen, 0.0))


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_shared_memory_has_few_bank_conflicts(case: Case) -> None:
    _, faults = run(build_logit_inputs(case.adapt(Shape(1, 16, 32, 128, 0))), case, Launcher())
    # The window of seven taps has another stride, which conflicts a little more.
    assert faults.clocks < (1.12 if case.taps > 5 else 1.1) * faults.accesses


@pytest.mark.parametrize("shape", [Shape(1, 9, 20, 40, 16), Shape(1, 12, 32, 72, 64, 33)])
def test_logits_are_the_same_among_several_layers_in_a_chunk_of_a_longer_call(shape: Shape) -> None:
    inputs = build_logit_inputs(shape)
    found, _ = run(inputs, FORWARD_CASES[0], Launcher())
    again, faults = run(move_into_longer_call(inputs), FORWARD_CASES[0], Launcher())
    assert faults.errors == NO_ERRORS, faults
    assert ((found == again) | ~find_seen(shape)[..., shape.left :]).all()


def test_large_numbers_saturate() -> None:
    shape = Shape(1, 9, 17, 16, 0)
    inputs = build_logit_inputs(shape)
    operands = replace(inputs.operands, contributions=inputs.operands.contributions * 1e6)
    inputs = inputs._replace(operands=operands, queries=inputs.queries * 1e5)
    found, _ = run(inputs, FORWARD_CASES[0], Launcher())
    assert (found.isfinite() | ~find_seen(shape)).all()


def test_a_term_that_is_not_a_number_shows_in_the_logits() -> None:
    """As on a GPU, whose conversion to float16 saturates but keeps NaN (PTX ISA, cvt.satfinite)."""
    shape = Shape(1, 9, 17, 16, 0)
    inputs = build_logit_inputs(shape)
    inputs.operands.contributions.fill_(torch.nan)
    found, _ = run(inputs, FORWARD_CASES[0], Launcher())
    assert (found.isnan() | ~find_seen(shape)).all()


FAULTS = {
    "a missing barrier": (
        "table_group);\n    barrier(memory);\n    last",
        "table_group);\n    last",
    ),
    "a wrong lane": ("select(g % 2 == 0, u32(0x3c00u)", "select(g % 2 == 1, u32(0x3c00u)"),
    "a wrong edge": (
        "16 * row_tile, G::FIRST_EDGE + jj - BEGIN,\n                       slice",
        "16 * row_tile + 1, G::FIRST_EDGE + jj - BEGIN,\n                       slice",
    ),
    "a wrong distance": ("4 + r - y", "5 + r - y"),
    "a wrong group of columns": ("LANE_COLUMNS == 4 ? 16 : 4", "LANE_COLUMNS == 4 ? 12 : 4"),
    "a wrong rest of a head": (
        "2>(advance(address(base, offset + t * 8), in_base), c",
        "2>(advance(address(base, offset + t * 16), in_base), c",
    ),
}
LOCAL_FAULTS = {
    "a wide window": ("row + (position - window + 1)", "row + (position - window)"),
    "hidden values before a document": (
        "select(T::is_inside(pixels.places, r, column)",
        "select(true",
    ),
    "no edge": ("if (pixels.has_begin) T::select_edges", "if (false) T::select_edges"),
    "another row's edge": ("places.of_row[r] = row -", "places.of_row[r] = 1 + row -"),
    "early whole tiles": ("find_first(first_row + G::ROWS - 1) + COLUMNS - 1", "find_first(first_row)"),
    "late tiles": ("find_first(first_row) - REACH + COLUMNS", "find_first(first_row) + COLUMNS"),
    "words that are not cleared": ("W::clear_last_columns(find_window(c, group), warp % 4)", "(void)0"),
}
WIDE_FAULTS = {
    "a second group's weights": ("[group * G::N_TILES + n]", "[n]"),
    "a second slice's distances": ("table_group, slice * T::STEPS)", "table_group, 0)"),
    "without contributions that earlier slices pass on": ("add_column(sum, pixels.passed[y], unit)", "(void)0"),
    "without sums that earlier slices store": ("add_column(sum, before[jj % 4], unit)", "(void)0"),
}
LOCAL_FAULT_SHAPE = Shape(1, 16, 32, 96, 160, 128, frozenset({226, 240}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, *LOCAL_FAULTS, *WIDE_FAULTS])
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    fault = plant_fault(tmp_path / "cuda", "MixerForward", *(FAULTS | LOCAL_FAULTS | WIDE_FAULTS)[name])
    case = CASES[int(name in FAULTS)]  # with two groups of columns, and a head dimension that is no multiple of 32
    case = WIDE_CASE if name in WIDE_FAULTS else case
    shape = case.adapt(LOCAL_FAULT_SHAPE if name in LOCAL_FAULTS else Shape(1, 16, 32, 64, 0))
    inputs = build_logit_inputs(shape)
    found, faults = run(inputs, case, Launcher(fault))
    assert faults.errors != NO_ERRORS or not is_correct(found, inputs, shape)
