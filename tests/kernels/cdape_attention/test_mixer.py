"""The backward mixer's CUDA kernels, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: half a unit in the last place for each value that the kernels round, and where the sign of a
hidden value is a matter of rounding, the difference that the other sign makes.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_emulation import NO_ERRORS, PADDING, SHAPES, TAPS, Launcher, Shape, draw_call, find_seen
from torch import Tensor
from torch.nn.functional import pad

from kernels.cdape_attention import mixer
from kernels.cdape_attention.mixer import MixerGradients, MixerInputs, differentiate_mixer
from kernels.cdape_attention.weights import get_weight_shape
from kernels.cuda.emulate import Faults, find_compiler

BF16_ROUNDING = 2.0**-9
UNCERTAIN = 1e-5
"""Hidden values so small have a sign that depends on the order of a sum."""

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def build_inputs(shape: Shape, seed: int = 0) -> MixerInputs:
    """Random inputs whose dL is NaN where a row does not see a column."""
    generator = torch.Generator().manual_seed(seed)
    call = draw_call(shape, generator)
    dlogits = torch.randn(shape.batch, shape.rows, shape.columns, 16, generator=generator).bfloat16()
    dlogits[..., shape.heads :] = 0
    dlogits[:, ~find_seen(shape)] = torch.nan
    dlogits = dlogits.unflatten(3, (8, 2)).transpose(2, 3).contiguous()
    bias = (call.contributions, call.edge)
    return MixerInputs(call.queries, call.keys, dlogits, *bias, call.weights, call.weight_shape, shape.position)


def run(inputs: MixerInputs, launcher: Launcher) -> tuple[dict[str, Tensor], Faults]:
    """All gradients by name, and what the emulator counted. Kernels may access only what they are given."""
    batch, rows, _, columns, _ = inputs.dlogits.shape
    dscores = torch.zeros(batch, inputs.shape.heads, rows, columns, dtype=torch.bfloat16)
    with launcher.watch(
        [inputs.queries, inputs.keys, inputs.dlogits, dscores], mixer, ["build_fragments", "build_table"]
    ):
        gradients = differentiate_mixer(inputs, dscores, launcher)
    return name_gradients(gradients, dscores, inputs), launcher.emulator.get_faults()


def name_gradients(gradients: MixerGradients, dscores: Tensor, inputs: MixerInputs) -> dict[str, Tensor]:
    heads, width, columns = inputs.shape.heads, inputs.shape.width, inputs.dlogits.shape[3]
    by_tap = gradients.patches[:, : TAPS * 16].view(2, TAPS, 16, -1)[:, :, :heads, :width]
    return {
        "scores": dscores,
        "table": gradients.contributions[: columns + PADDING],
        "bias": gradients.bias_table[:columns],
        "edge": gradients.edge,
        "w1": by_tap[0],
        "w2": by_tap[1].flip(0),
    }


def compute_truth(inputs: MixerInputs, shape: Shape) -> dict[str, tuple[Tensor, Tensor]]:
    """Each gradient in float64, and by how much rounding may change it. Scores are rounded as in the kernels."""
    seen = find_seen(shape)
    heads, width, columns = shape.heads, shape.width, shape.columns
    hidden_columns = columns + PADDING
    scores = torch.einsum("bhid,bhjd->bhij", inputs.queries.double(), inputs.keys[:, :, :columns].double())
    scores = torch.where(seen, scores.float().half().double(), 0.0)
    by_head = inputs.dlogits.permute(0, 2, 4, 1, 3).flatten(1, 2)[:, :heads]
    dlogits = torch.where(seen, by_head.double(), 0.0)
    w1, w2 = inputs.weights.w1[:, :heads, :width].double(), inputs.weights.w2[:, :width, :heads].double()

    distance = torch.arange(shape.rows)[:, None] + shape.position - torch.arange(hidden_columns)
    alive, inner = distance >= -PADDING, torch.arange(hidden_columns) >= PADDING
    hidden = inputs.contributions.double()[(distance + PADDING).clamp(min=0)]
    hidden[:, :PADDING] = inputs.edge.double()
    hidden = hidden.expand(shape.batch, -1, -1, -1).clone()
    wide_scores, wide_dlogits = pad(scores, (PADDING, 2 * PADDING)), pad(dlogits, (PADDING, 2 * PADDING))
    for tap in range(TAPS):
        hidden += torch.einsum("bhij,hd->bijd", wide_scores[..., tap : tap + hidden_columns], w1[tap])

    def reversed_tap(x: Tensor, tap: int, size: int) -> Tensor:
        return x[..., 2 * PADDING - tap : 2 * PADDING - tap + size]

    before = sum(
        torch.einsum("bhij,dh->bijd", reversed_tap(wide_dlogits, tap, hidden_columns), w2[tap]) for tap in range(TAPS)
    )
    assert isinstance(before, Tensor)
    before = torch.where(alive[..., None], before, 0.0)
    gradient = before * torch.where(hidden > 0, 1.0, 0.01)
    active = torch.where(alive[..., None], torch.where(hidden > 0, hidden, 0.01 * hidden), 0.0)
    doubt = gradient.abs() * BF16_ROUNDING * 2 + torch.where(hidden.abs() < UNCERTAIN, before.abs(), 0.0)

    def to_scores(x: Tensor, weight: Tensor) -> Tensor:
        wide = pad(x.permute(0, 3, 1, 2), (PADDING, PADDING))
        parts = [torch.einsum("bdij,hd->bhij", reversed_tap(wide, tap, columns), weight[tap]) for tap in range(TAPS)]
        return torch.where(seen, torch.stack(parts).sum(0), 0.0)

    def to_table(x: Tensor, at: Tensor, rows: int, kept: Tensor) -> Tensor:
        total = torch.zeros(rows, x.shape[-1], dtype=torch.float64)
        return total.index_add_(0, at[kept], x.sum(0)[kept])

    def to_weight(left: Tensor, right: Tensor, shift: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        return torch.stack(
            [torch.einsum("bhij,bijd->hd", shift(left, tap, hidden_columns), right) for tap in range(TAPS)]
        )

    def forward_tap(x: Tensor, tap: int, size: int) -> Tensor:
        return x[..., tap : tap + size]

    dscores = dlogits + to_scores(gradient, w1)
    size = dlogits.abs() + to_scores(gradient.abs(), w1.abs())
    kept = alive & inner
    rows = columns + PADDING
    dbias = to_table(dlogits.permute(0, 2, 3, 1), distance[:, :columns], columns, seen)
    tiny = 2.0**-20  # of sums in float32
    bias_size = to_table(dlogits.abs().permute(0, 2, 3, 1), distance[:, :columns], columns, seen)
    w1_size = to_weight(wide_scores.abs(), gradient.abs(), forward_tap)
    w2_size = to_weight(wide_dlogits.abs(), active.abs(), reversed_tap)
    return {
        "scores": (dscores, 3 * BF16_ROUNDING * size + to_scores(doubt, w1.abs())),
        "table": (
            to_table(gradient, distance + PADDING, rows, kept),
            to_table(doubt, distance + PADDING, rows, kept) + tiny,
        ),
        "bias": (dbias, bias_size * tiny),
        "edge": (gradient[:, :, :PADDING], doubt[:, :, :PADDING] + tiny),
        "w1": (
            to_weight(wide_scores, gradient, forward_tap),
            to_weight(wide_scores.abs(), doubt, forward_tap) + 2 * BF16_ROUNDING * w1_size + tiny,
        ),
        "w2": (to_weight(wide_dlogits, active, reversed_tap), 2 * BF16_ROUNDING * w2_size + tiny),
    }


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(mixer.FOLDER)


@settings(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_gradients_are_those_of_float64_and_no_access_is_wrong(shape: Shape, seed: int) -> None:
    inputs = build_inputs(shape, seed)
    found, faults = run(inputs, Launcher(mixer.FOLDER))
    assert faults.errors == NO_ERRORS, faults
    for name, (true, bound) in compute_truth(inputs, shape).items():
        error = (found[name].double() - true).abs()
        assert (error <= bound).all(), (name, (error / bound.clamp(min=1e-30)).max())


def test_the_order_of_warps_changes_no_bit(launcher: Launcher) -> None:
    inputs = build_inputs(Shape(1, 12, 32, 72, 0))
    found, _ = run(inputs, launcher)
    again, faults = run(inputs, Launcher(mixer.FOLDER, backwards=True))
    assert faults.errors == NO_ERRORS
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_shared_memory_has_few_bank_conflicts(launcher: Launcher) -> None:
    inputs = build_inputs(Shape(1, 16, 32, 96, 0))
    _, faults = run(inputs, launcher)
    assert faults.clocks < 1.1 * faults.accesses


FAULTS = {
    "a missing barrier": ("    mix<false>(st, c, first);\n    barrier(memory);\n", "    mix<false>(st, c, first);\n"),
    "a wrong lane": ("a[1] = transpose_8x8(x[2]);", "a[1] = transpose_8x8(x[1]);"),
    "a wrong edge": ("j >= 0 && j + x <= last", "j >= 0 && j + x <= last + 1"),
    "a wrong distance": ("- (G::COLUMNS - 1);", "- G::COLUMNS;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    shutil.copytree(mixer.FOLDER, folder)
    header = folder / "mixer_backward.h"
    source, (right, wrong) = header.read_text(encoding="utf-8"), FAULTS[name]
    assert source.count(right) == 1
    header.write_text(source.replace(right, wrong), encoding="utf-8")
    shape = Shape(1, 16, 32, 64, 0)
    inputs = build_inputs(shape)
    found, faults = run(inputs, Launcher(folder))
    truth = compute_truth(inputs, shape)
    is_wrong = any(not ((found[key].double() - true).abs() <= bound).all() for key, (true, bound) in truth.items())
    assert is_wrong or faults.errors != NO_ERRORS


def test_support_is_stated_for_shapes_that_the_kernels_take() -> None:
    shape = get_weight_shape(16, 32, 3, True)
    assert mixer.is_supported(shape, torch.bfloat16, 64, 512)
    for other, dtype, dim, columns in (
        (get_weight_shape(16, 32, 5, True), torch.bfloat16, 64, 512),
        (get_weight_shape(8, 32, 3, True), torch.bfloat16, 64, 512),
        (get_weight_shape(16, 16, 3, True), torch.bfloat16, 64, 512),
        (shape, torch.float16, 64, 512),
        (shape, torch.bfloat16, 80, 512),
        (shape, torch.bfloat16, 64, 511),
    ):
        assert not mixer.is_supported(other, dtype, dim, columns)
