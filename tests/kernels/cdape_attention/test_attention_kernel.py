"""The CUDA kernel of the forward pass, run on the CPU from the source that a GPU runs, against float64.

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
from megatron.kernels.cdape_attention.attention_kernel import ATTENTION_KERNELS, compute_attention
from megatron.kernels.cdape_attention.geometry import HEADS, WIDTH, KernelForm, choose_kernel
from megatron.kernels.cdape_attention.head_products import AttentionOutput
from megatron.kernels.cdape_attention.mixer import ChunkInputs

CASES = [
    Case(32, 32, 64, torch.bfloat16),
    Case(32, 32, 48, torch.float16, 1),
    Case(16, 64, 80, torch.float16),
    Case(16, 64, 128, torch.bfloat16, 5),
    Case(16, 64, 64, torch.bfloat16, 7),
    Case(16, 64, 112, torch.float16, width=64),
]

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


class Softmax:
    """Random values and sinks of a call, and the results to write, as parts of longer tensors."""

    def __init__(self, shape: Shape, seed: int = 0, *, sinks: bool = False, offsets: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed + 1)
        batch, heads, rows, columns = shape.batch, shape.heads, shape.rows, shape.columns
        values = torch.randn(batch, heads, columns + 5, shape.dim, generator=generator)
        self.values = values.to(shape.dtype)[:, :, shape.left :]
        self.sinks = torch.randn(heads, generator=generator) * 3 if sinks else None
        self.offsets = torch.randn(batch, heads, rows + 2, generator=generator)[..., :rows] if offsets else None
        output, residue = (
            torch.full((rows + 2, batch, heads, shape.dim), torch.nan, dtype=shape.dtype) for _ in range(2)
        )
        stats = torch.full((2, batch, heads, rows + 2), torch.nan)
        of_rows = (x.permute(1, 2, 0, 3)[:, :, :rows] for x in (output, residue))  # laid out as activations
        self.attended = AttentionOutput(next(of_rows), stats[..., :rows], next(of_rows))

    def list_tensors(self) -> list[Tensor]:
        found = (self.values, self.sinks, self.offsets, *self.attended)
        return [x if x._base is None else x._base for x in found if x is not None]


def run(inputs: ChunkInputs, softmax: Softmax, launcher: Launcher, case: Case = CASES[0]) -> Faults:
    inputs = unpack_operands(inputs)
    with launcher.watch([*find_inputs(inputs), *softmax.list_tensors()]):
        kernel = case.build(ATTENTION_KERNELS, inputs)
        compute_attention(inputs, softmax.values, softmax.sinks, softmax.offsets, softmax.attended, kernel, launcher)
    return launcher.emulator.get_faults()


def find_error_ratio(softmax: Softmax, inputs: ChunkInputs, shape: Shape) -> float:
    """Return the largest ratio of an error to its bound."""
    seen = find_seen(shape)
    logits, doubt = (x[..., shape.left :] for x in compute_true_logits(inputs, shape))
    logits = logits.masked_fill(~seen[..., shape.left :], float("-inf"))
    doubt = doubt.masked_fill(~seen[..., shape.left :], 0.0)
    sinks = torch.full(logits.shape[:3], float("-inf"), dtype=torch.float64)
    if softmax.sinks is not None:
        sinks = softmax.sinks[:, None] - (0.0 if softmax.offsets is None else softmax.offsets.double())
    sums = torch.logaddexp(logits.logsumexp(-1), sinks.double().expand(logits.shape[:3]))
    values = softmax.values[:, :, : shape.columns - shape.left].double()
    weights = (logits - sums[..., None]).exp()
    rounding = ROUNDINGS[shape.dtype] * 2
    output, size = weights @ values, (weights * (doubt + rounding)) @ values.abs()
    # Errors of logits change the sum as well, by which the output is divided.
    size = size + output.abs() * (weights * doubt).sum(-1, keepdim=True) + 1e-6
    found, stats, residue = softmax.attended
    assert residue is not None
    found_sums = (stats[0].double() + stats[1].double().log2()) * math.log(2)
    pairs = (
        (found.double() - output, size + rounding * found.double().abs()),
        (found.double() + residue.double() - output, size + rounding**2 * found.double().abs() + 1e-7),
        (found_sums - sums, (weights * doubt).sum(-1) + doubt.amax(-1) ** 2 + 1e-5),
    )
    return max(float((error.abs() / bound).nan_to_num(torch.inf).max()) for error, bound in pairs)


def check_attention(case: Case, shape: Shape, seed: int = 0, **options: bool) -> None:
    shape = case.adapt(shape)
    inputs, softmax = build_logit_inputs(shape, seed), Softmax(shape, seed, **options)
    faults = run(inputs, softmax, Launcher(), case)
    assert faults.errors == NO_ERRORS, faults
    assert find_error_ratio(softmax, inputs, shape) <= 1


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000), sinks=st.booleans(), offsets=st.booleans())
def test_output_is_that_of_float64_and_no_access_is_wrong(
    case: Case, shape: Shape, seed: int, sinks: bool, offsets: bool
) -> None:
    check_attention(case, shape, seed, sinks=sinks, offsets=offsets)


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=LOCAL_SHAPES, seed=st.integers(0, 1000))
def test_output_of_windows_and_documents_is_that_of_float64(case: Case, shape: Shape, seed: int) -> None:
    check_attention(case, shape, seed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_where_windows_and_documents_begin_is_that_of_float64(case: Case) -> None:
    for shape in LOCAL_EXAMPLES:
        check_attention(case, shape, sinks=True)


def test_the_order_of_warps_changes_no_bit() -> None:
    shape = Shape(1, 12, 32, 72, 0)
    inputs, first, second = build_logit_inputs(shape), Softmax(shape), Softmax(shape)
    run(inputs, first, Launcher())
    assert run(inputs, second, Launcher(backwards=True)).errors == NO_ERRORS
    assert all(map(torch.equal, first.attended, second.attended))


def test_statistics_are_those_of_the_logits_that_the_backward_pass_computes() -> None:
    shape = Shape(1, 12, 32, 40, 8)
    inputs, softmax, launcher = build_logit_inputs(shape), Softmax(shape), Launcher()
    run(inputs, softmax, launcher)
    inputs = unpack_operands(inputs)
    with launcher.watch(find_inputs(inputs)):
        narrow = Case(32, 16, 64, torch.bfloat16).build(logit_kernels.LOGIT_KERNELS, inputs)
        logits = logit_kernels.compute_logits(inputs, narrow, launcher)
    logits = logits.masked_fill(~find_seen(shape), float("-inf"))
    assert torch.equal(softmax.attended.stats[0], logits.amax(-1) * torch.tensor(1 / math.log(2)))


def test_output_is_the_same_among_several_layers_in_a_chunk_of_a_longer_call() -> None:
    shape = Shape(1, 12, 32, 40, 16)
    inputs, first, second = build_logit_inputs(shape), Softmax(shape), Softmax(shape)
    run(inputs, first, Launcher())
    assert run(move_into_longer_call(inputs), second, Launcher()).errors == NO_ERRORS
    assert all(map(torch.equal, first.attended, second.attended))


def test_a_residue_is_stored_only_on_request() -> None:
    shape = Shape(1, 9, 17, 40, 0)
    inputs, first, second = build_logit_inputs(shape), Softmax(shape), Softmax(shape)
    run(inputs, first, Launcher())
    residue, second.attended = second.attended.residue, second.attended._replace(residue=None)
    assert run(inputs, second, Launcher()).errors == NO_ERRORS
    assert residue is not None
    assert residue.isnan().all()
    assert torch.equal(first.attended.output, second.attended.output)


def test_large_logits_do_not_overflow_and_nan_shows_in_the_output() -> None:
    shape = Shape(1, 9, 17, 40, 0)
    inputs, softmax = build_logit_inputs(shape), Softmax(shape)
    run(inputs._replace(queries=inputs.queries * 1e4), softmax, Launcher())
    assert softmax.attended.output.isfinite().all()
    inputs.operands.contributions.fill_(torch.nan)
    run(inputs, softmax, Launcher())
    assert softmax.attended.output.isnan().all()


@pytest.mark.parametrize("sink", [float("-inf"), -1e38])
def test_a_sink_without_weight_has_no_effect_even_if_a_row_sees_no_column_of_its_first_tile(sink: float) -> None:
    for shape in LOCAL_EXAMPLES[2:4]:
        inputs, softmax, expected = build_logit_inputs(shape), Softmax(shape, sinks=True), Softmax(shape)
        assert softmax.sinks is not None
        softmax.sinks.fill_(sink)
        run(inputs, softmax, Launcher())
        run(inputs, expected, Launcher())
        assert all(map(torch.equal, softmax.attended, expected.attended))


def test_shared_memory_has_few_bank_conflicts() -> None:
    shape = Shape(1, 16, 32, 128, 0)
    faults = run(build_logit_inputs(shape), Softmax(shape), Launcher())
    assert faults.clocks < 1.1 * faults.accesses


@pytest.mark.parametrize("arch", [80, 90])
def test_blocks_of_larger_sizes_have_fewer_rows(arch: int) -> None:
    form = KernelForm(3, 64, torch.bfloat16)
    for other, rows in (
        (form, 32),
        (form._replace(dim=80), 16),
        (form._replace(kernel_size=5), 16),
        (form._replace(width=2 * WIDTH), 16),
    ):
        kernel = choose_kernel(ATTENTION_KERNELS, other, arch)
        assert kernel is not None
        assert (kernel.tile.rows, kernel.tile.warps) == (rows, 8)
    assert choose_kernel(ATTENTION_KERNELS, form._replace(heads=2 * HEADS), arch) is None


FAULTS = {
    "sums that are not scaled": ("shrink[0] < 1.0f || shrink[1] < 1.0f", "shrink[0] < 0.0f"),
    "a maximum over two lanes": ("top = maximum(top, exchange_lanes(top, 2));", ""),
    "a total of two lanes": ("total += exchange_lanes(total, 2);", ""),
    "values in another order": ("t * 4 + (first + y), i32(0)", "t * 4 + (first + 3 - y), i32(0)"),
    "values of whole tiles in another order": ("head + (long long)(first + y)", "head + (long long)(first + 3 - y)"),
    "a wrong dimension": ("n % 2 == 0 ? low_halves", "n % 2 == 1 ? low_halves"),
    "a row's logits of another row": ("R::row_offset(g) + (R::row_offset(row)", "R::row_offset(g) + (R::row_offset(0)"),
    "a wrong copy of the bias": (
        "g % 4 * (G::HEADS * c.in.bias_stride * 4)",
        "(g + 1) % 4 * (G::HEADS * c.in.bias_stride * 4)",
    ),
    "a column too many": ("column <= g + (c.position() + row), logit", "column <= g + (c.position() + row) + 1, logit"),
    "a first column too late": ("column >= begin, logit", "column > begin, logit"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    fault = plant_fault(tmp_path / "cuda", "Attention", *FAULTS[name])
    shape = Shape(1, 16, 32, 96, 0, 40 if name == "a first column too late" else None)
    inputs, softmax = build_logit_inputs(shape), Softmax(shape)
    faults = run(inputs, softmax, Launcher(fault))
    assert faults.errors != NO_ERRORS or find_error_ratio(softmax, inputs, shape) > 1
