"""The CUDA kernel for P and dL, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: those of the logits, and half a unit in the last place for each value that the kernel rounds.
"""

import math
from pathlib import Path

import pytest
import torch
from cuda_emulator import Faults, find_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_emulation import (
    CASES,
    LOCAL_CASES,
    LOCAL_EXAMPLES,
    LOCAL_SHAPES,
    NO_ERRORS,
    ROUNDINGS,
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

from megatron.kernels.cdape_attention import logit_kernels
from megatron.kernels.cdape_attention.logit_kernels import (
    LOGIT_GRADIENT_KERNELS,
    LogitGradients,
    SoftmaxChunk,
    differentiate_softmax,
)
from megatron.kernels.cdape_attention.mixer import ChunkInputs

MAP_CASES = [
    *CASES,
    Case(16, 64, 96, torch.bfloat16, held_tensors=1),
]

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def attend(inputs: ChunkInputs, shape: Shape, seed: int = 0) -> SoftmaxChunk:
    """Return random values and gradients, and the softmax results of the true logits, as parts of longer tensors."""
    generator = torch.Generator().manual_seed(seed + 1)
    batch, heads, rows, columns = shape.batch, shape.heads, shape.rows, shape.columns
    values = torch.randn(batch, heads, columns + 5, shape.dim, generator=generator).to(shape.dtype)[:, :, shape.left :]
    doutput = torch.randn(rows + 2, batch, heads, shape.dim, generator=generator).to(shape.dtype)
    doutput = doutput.permute(1, 2, 0, 3)[:, :, :rows]  # laid out as activations
    logits = compute_true_logits(inputs, shape)[0].masked_fill(~find_seen(shape), float("-inf"))
    maximum = logits.amax(-1)
    exact = logits.softmax(-1)[..., shape.left :] @ values[:, :, : columns - shape.left].double()
    stats = torch.full((2, batch, heads, rows + 2), torch.nan)
    output, residue = (torch.zeros_like(doutput) for _ in range(2))
    output.copy_(exact)
    residue.copy_(exact - output.double())
    stats[0, ..., :rows] = maximum / math.log(2)
    stats[1, ..., :rows] = (logits - maximum[..., None]).exp().sum(-1)
    return SoftmaxChunk(values, output, residue, doutput, stats[..., :rows])


def run(
    inputs: ChunkInputs, attended: SoftmaxChunk, launcher: Launcher, case: Case = CASES[0]
) -> tuple[LogitGradients, Tensor, Faults]:
    sums = torch.full_like(attended.stats[0], torch.nan)
    sums = torch.full((*sums.shape[:2], sums.shape[2] + 2), torch.nan)[..., : sums.shape[2]]
    bases = [x._base if x._base is not None else x for x in (*attended, sums)]
    inputs = unpack_operands(inputs)
    with launcher.watch([*find_inputs(inputs), *bases]):
        found = differentiate_softmax(inputs, attended, sums, case.build(LOGIT_GRADIENT_KERNELS, inputs), launcher)
    return found, sums, launcher.emulator.get_faults()


def find_error_ratio(
    found: LogitGradients, sums: Tensor, inputs: ChunkInputs, attended: SoftmaxChunk, shape: Shape
) -> float:
    """Return the largest ratio of an error to its bound."""
    seen = find_seen(shape)
    true_logits, doubt = compute_true_logits(inputs, shape)
    logits = true_logits.masked_fill(~seen, float("-inf"))
    probabilities = logits.softmax(-1)
    seen, doubt, probabilities = (x[..., shape.left :] for x in (seen, doubt, probabilities))
    dprobabilities = attended.doutput.double() @ attended.values[:, :, : shape.columns - shape.left].double().mT
    means = (probabilities * dprobabilities).sum(-1)
    size = attended.doutput.double().norm(dim=-1) * attended.output.double().norm(dim=-1)
    means_bound = size * 2.0**-14
    gradient = probabilities * (dprobabilities - means[..., None])
    relative = doubt + 2 * ROUNDINGS[shape.dtype]
    bound = gradient.abs() * relative + probabilities * means_bound[..., None] + 1e-6
    found_gradient = found.dlogits.permute(0, 2, 4, 1, 3).flatten(1, 2)
    everywhere = torch.ones((), dtype=torch.bool)
    groups = (
        (seen, found.probabilities, probabilities, probabilities * relative + 1e-7),
        (seen, found_gradient[:, : shape.heads], gradient, bound),
        (seen, found_gradient[:, shape.heads :], torch.zeros(()).double(), torch.tensor(1e-30).double()),
        (everywhere, sums, means, means_bound),
    )
    ratios = [
        torch.where(known, (ours.double() - true).abs() / limit, 0.0)
        for known, ours, true, limit in groups
        if ours.numel()
    ]
    return max(float(ratio.nan_to_num(torch.inf).max()) for ratio in ratios)


@pytest.mark.parametrize("case", MAP_CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000), residual_bias=st.booleans())
def test_maps_are_those_of_float64_and_no_access_is_wrong(
    case: Case, shape: Shape, seed: int, residual_bias: bool
) -> None:
    check_maps(case, shape, seed, residual_bias=residual_bias)


@pytest.mark.parametrize("case", LOCAL_CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=LOCAL_SHAPES, seed=st.integers(0, 1000))
def test_maps_of_windows_and_documents_are_those_of_float64(case: Case, shape: Shape, seed: int) -> None:
    check_maps(case, shape, seed)


@pytest.mark.parametrize("case", LOCAL_CASES, ids=str)
def test_maps_where_windows_and_documents_begin_are_those_of_float64(case: Case) -> None:
    for shape in LOCAL_EXAMPLES:
        check_maps(case, shape)


def check_maps(case: Case, shape: Shape, seed: int = 0, *, residual_bias: bool = True) -> None:
    shape = case.adapt(shape)
    inputs = build_logit_inputs(shape, seed, residual_bias=residual_bias)
    attended = attend(inputs, shape, seed)
    found, sums, faults = run(inputs, attended, Launcher(), case)
    assert faults.errors == NO_ERRORS, faults
    assert find_error_ratio(found, sums, inputs, attended, shape) <= 1


@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_the_order_of_warps_changes_no_bit(case: Case) -> None:
    shape = case.adapt(Shape(1, 12, 32, 72, 0))
    inputs = build_logit_inputs(shape)
    attended = attend(inputs, shape)
    found, _, _ = run(inputs, attended, Launcher(), case)
    again, _, faults = run(inputs, attended, Launcher(backwards=True), case)
    assert faults.errors == NO_ERRORS
    seen = find_seen(shape)
    assert ((found.probabilities == again.probabilities) | ~seen).all()
    assert ((found.dlogits == again.dlogits) | ~seen.transpose(1, 2)[..., None]).all()


def test_logits_are_those_of_the_forward_pass() -> None:
    """A softmax's statistics hold for the logits that they were computed from, not for others that round otherwise."""
    shape = Shape(1, 12, 32, 40, 8)
    inputs = build_logit_inputs(shape)
    attended, launcher = attend(inputs, shape), Launcher()
    found, _, _ = run(inputs, attended, launcher)
    inputs = unpack_operands(inputs)
    with launcher.watch(find_inputs(inputs)):
        narrow = Case(32, 16, 64, torch.bfloat16).build(logit_kernels.LOGIT_KERNELS, inputs)
        logits = logit_kernels.compute_logits(inputs, narrow, launcher)
    norms = attended.stats[0] + attended.stats[1].log2()
    expected = torch.exp2(logits * (1 / math.log(2)) - norms[..., None]).bfloat16()
    is_same = (found.probabilities == expected)[find_seen(shape).expand_as(expected)]
    assert is_same.float().mean() > 0.99  # exponentials of two libraries


def test_maps_are_the_same_among_several_layers_in_a_chunk_of_a_longer_call() -> None:
    shape = Shape(1, 12, 32, 40, 16)
    inputs = build_logit_inputs(shape)
    attended = attend(inputs, shape)
    found, _, _ = run(inputs, attended, Launcher())
    again, _, faults = run(move_into_longer_call(inputs), attended, Launcher())
    assert faults.errors == NO_ERRORS, faults
    assert ((found.probabilities == again.probabilities) | ~find_seen(shape)).all()


@pytest.mark.parametrize("case", MAP_CASES, ids=str)
def test_shared_memory_has_few_bank_conflicts(case: Case) -> None:
    shape = case.adapt(Shape(1, 16, 32, 128, 0))
    inputs = build_logit_inputs(shape)
    _, _, faults = run(inputs, attend(inputs, shape), Launcher(), case)
    assert faults.clocks < 1.1 * faults.accesses


FAULTS = {
    "a wrong diagonal": ("t == g / 2;", "t == g % 4;"),
    "a wrong copy of the bias": ("g % 4 * copy_bytes", "(g + 1) % 4 * copy_bytes"),
    "no residue": ("part < 2; part++)\n          UNROLL_FOR", "part < 1; part++)\n          UNROLL_FOR"),
    "a wrong column": ("t * 4 + (column + y) <=", "t * 4 + (column + y) <"),
    "a wrong first column": ("t * 4 + (column + y) >= begin", "t * 4 + (column + y) > begin"),
    "stores left of the map": ("t * 4 + column >= 0", "true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    fault = plant_fault(tmp_path / "cuda", "LogitGradient", *FAULTS[name])
    is_local = name in ("a wrong first column", "stores left of the map")
    shape = Shape(1, 16, 32, 64, 0, 40 if is_local else None)
    inputs = build_logit_inputs(shape)
    attended = attend(inputs, shape)
    found, sums, faults = run(inputs, attended, Launcher(fault))
    assert faults.errors != NO_ERRORS or find_error_ratio(found, sums, inputs, attended, shape) > 1
