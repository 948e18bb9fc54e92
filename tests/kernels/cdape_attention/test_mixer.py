"""The backward mixer's CUDA kernels, run on the CPU from the source that a GPU runs, against float64.

Bounds are elementwise: half a unit in the last place for each value that the kernels round, and where the sign of a
hidden value is a matter of rounding, the difference that the other sign makes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_emulator import Faults, find_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_emulation import (
    CASES,
    LINEAR_CASE,
    LOCAL_CASES,
    LOCAL_EXAMPLES,
    LOCAL_SHAPES,
    NO_ERRORS,
    ROUNDINGS,
    SEVEN_TAPS,
    SHAPES,
    Case,
    Launcher,
    Shape,
    begin_hidden,
    draw_call,
    find_documents,
    find_inputs,
    find_seen,
    move_into_longer_call,
    plant_fault,
    unpack_operands,
)
from torch import Tensor
from torch.nn.functional import pad

from megatron.kernels.cdape_attention import logit_kernels, mixer, mixer_chunks
from megatron.kernels.cdape_attention.attention_kernel import ATTENTION_KERNELS
from megatron.kernels.cdape_attention.bias_product import get_bias_product
from megatron.kernels.cdape_attention.chunks import list_chunks
from megatron.kernels.cdape_attention.geometry import KernelFamily, KernelForm, choose_kernel
from megatron.kernels.cdape_attention.layer_terms import build_problems
from megatron.kernels.cdape_attention.mixer import ChunkInputs, MixerGradients, differentiate_mixer
from megatron.kernels.cdape_attention.mixer_operands import unpack_tables, unpack_weights
from megatron.kernels.cdape_attention.scores import count_padded_channels
from megatron.kernels.cdape_attention.term_sums import add_mixer_sums, allocate_term_sums, unpack_mixer_sums
from megatron.kernels.cdape_attention.weights import PackedWeights, WeightShape, get_weight_shape

TOO_LARGE = {
    mixer.SCORE_GRADIENT_KERNELS: {(80, 5, 64, 112), (80, 5, 64, 128)},
    ATTENTION_KERNELS: {(80, 7, 32, 128)},
}
"""Compute capability, kernel size, width and head dimension that exceed the shared memory of a block."""
UNCERTAIN = 1e-5
"""Hidden values so small have a sign that depends on the order of a sum."""

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")


def build_inputs(shape: Shape, seed: int = 0) -> tuple[ChunkInputs, Tensor]:
    """Return random inputs, and dL, which is NaN where a row does not see a column."""
    generator = torch.Generator().manual_seed(seed)
    call = draw_call(shape, generator)
    dlogits = torch.randn(shape.batch, shape.rows, shape.columns, 16, generator=generator).to(shape.dtype)
    dlogits[..., shape.heads :] = 0
    dlogits[~find_seen(shape)[:, 0]] = torch.nan
    dlogits = dlogits[:, :, shape.left :].unflatten(3, (8, 2)).transpose(2, 3).contiguous()
    position = shape.position - shape.left
    return ChunkInputs(call.queries, call.keys, call.operands, 0, 0, position, shape.spans), dlogits


def run(
    inputs: ChunkInputs, dlogits: Tensor, launcher: Launcher, case: Case = CASES[0]
) -> tuple[dict[str, Tensor], Faults]:
    """Return all gradients by name, and the faults found by the emulator.

    Kernels may access only the tensors passed to them.
    """
    batch, rows, _, columns, _ = dlogits.shape
    dscores = torch.zeros(batch, inputs.operands.shape.heads, rows, columns, dtype=case.dtype)
    inputs = unpack_operands(inputs)
    kernels = case.build(mixer.SCORE_GRADIENT_KERNELS, inputs), case.build(mixer.WEIGHT_GRADIENT_KERNELS, inputs)
    tensors = [*find_inputs(inputs), dlogits, dscores]
    with launcher.watch(tensors):
        gradients = differentiate_mixer(inputs, dlogits, dscores, kernels, launcher)
    return name_gradients(gradients, dscores, inputs.operands.shape), launcher.emulator.get_faults()


def name_gradients(gradients: MixerGradients, dscores: Tensor, shape: WeightShape) -> dict[str, Tensor]:
    columns = dscores.shape[3]
    (contributions,), (bias_table,) = unpack_tables(gradients.tables.sum(0, keepdim=True), shape)
    (patches,) = unpack_weights(gradients.weights.sum(0), shape)
    channels = count_padded_channels(shape.heads)
    taps = shape.kernel_size
    by_tap = patches[:, : taps * channels].view(2, taps, channels, -1)[:, :, : shape.heads, : shape.width]
    return {
        "scores": dscores,
        "table": contributions[: columns + shape.padding],
        "bias": bias_table[:columns],
        "edge": gradients.edge[..., : shape.width],
        "w1": by_tap[0],
        "w2": by_tap[1].flip(0),
    }


def compute_truth(inputs: ChunkInputs, dlogits: Tensor, shape: Shape) -> dict[str, tuple[Tensor, Tensor]]:
    """Each gradient in float64, and by how much rounding may change it. Scores and U are rounded as in the kernels."""
    rounding = ROUNDINGS[shape.dtype]
    seen = find_seen(shape)
    heads, width, columns = shape.heads, shape.width, shape.columns
    taps, padding = shape.taps, shape.padding
    padded_width = inputs.operands.padded_sizes[1]
    slices = padded_width // (16 if taps > 3 or padded_width > 32 else 32)
    hidden_columns = columns + padding
    scores, hidden, alive, at_edge, distance = begin_hidden(inputs, shape)
    scores = scores.float().half().double()
    hidden = torch.where(at_edge[..., None], hidden, hidden.float().half().double())
    count = dlogits.shape[3]
    by_head = dlogits.permute(0, 2, 4, 1, 3).flatten(1, 2)[:, :heads]
    dlogits = torch.where(seen, pad(by_head.double(), (shape.left, 0)), 0.0)
    weights = inputs.operands.weights
    w1, w2 = weights.w1[0, :, :heads, :width].double(), weights.w2[0, :, :width, :heads].double()

    wide_scores, wide_dlogits = pad(scores, (padding, 2 * padding)), pad(dlogits, (padding, 2 * padding))
    for tap in range(taps):
        hidden = hidden + torch.einsum("bhij,hd->bijd", wide_scores[..., tap : tap + hidden_columns], w1[tap])

    def reversed_tap(x: Tensor, tap: int, size: int) -> Tensor:
        return x[..., 2 * padding - tap : 2 * padding - tap + size]

    before = sum(
        torch.einsum("bhij,dh->bijd", reversed_tap(wide_dlogits, tap, hidden_columns), w2[tap]) for tap in range(taps)
    )
    assert isinstance(before, Tensor)
    before = torch.where(alive[..., None], before, 0.0)
    slope = 1.0 if shape.is_linear else 0.01
    gradient = before * torch.where(hidden > 0, 1.0, slope)
    active = torch.where(alive[..., None], torch.where(hidden > 0, hidden, slope * hidden), 0.0)
    doubt = gradient.abs() * rounding * 2
    if not shape.is_linear:
        doubt = doubt + torch.where(hidden.abs() < UNCERTAIN, before.abs(), 0.0)

    def to_scores(x: Tensor, weight: Tensor) -> Tensor:
        wide = pad(x.permute(0, 3, 1, 2), (padding, padding))
        parts = [torch.einsum("bdij,hd->bhij", reversed_tap(wide, tap, columns), weight[tap]) for tap in range(taps)]
        return torch.where(seen, torch.stack(parts).sum(0), 0.0)

    def to_table(x: Tensor, at: Tensor, rows: int, kept: Tensor) -> Tensor:
        total = torch.zeros(rows, x.shape[-1], dtype=torch.float64)
        return total.index_add_(0, at.expand_as(kept)[kept], x[kept])

    def to_weight(left: Tensor, right: Tensor, shift: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        return torch.stack(
            [torch.einsum("bhij,bijd->hd", shift(left, tap, hidden_columns), right) for tap in range(taps)]
        )

    def forward_tap(x: Tensor, tap: int, size: int) -> Tensor:
        return x[..., tap : tap + size]

    dscores = dlogits + to_scores(gradient, w1)
    size = dlogits.abs() + to_scores(gradient.abs(), w1.abs())
    kept = alive & ~at_edge
    rows = columns + padding
    dbias = to_table(dlogits.permute(0, 2, 3, 1), distance[:, :columns], columns, seen[:, 0])
    tiny = 2.0**-20  # of sums in float32
    bias_size = to_table(dlogits.abs().permute(0, 2, 3, 1), distance[:, :columns], columns, seen[:, 0])
    w1_size = to_weight(wide_scores.abs(), gradient.abs(), forward_tap)
    w2_size = to_weight(wide_dlogits.abs(), active.abs(), reversed_tap)
    left = shape.left  # entries further left are zero
    edge_columns = (find_documents(shape).long() + torch.arange(padding))[..., None].expand(-1, -1, -1, width)
    exact = {
        # The contribution of each slice of the width is rounded.
        "scores": (dscores, 2 * (1 + slices) * rounding * size + to_scores(doubt, w1.abs())),
        "table": (
            to_table(gradient, distance + padding, rows, kept),
            to_table(doubt, distance + padding, rows, kept) + tiny,
        ),
        "bias": (dbias, bias_size * tiny),
        "edge": (gradient.gather(2, edge_columns), doubt.gather(2, edge_columns) + tiny),
        "w1": (
            to_weight(wide_scores, gradient, forward_tap),
            to_weight(wide_scores.abs(), doubt, forward_tap) + 2 * rounding * w1_size + tiny,
        ),
        "w2": (to_weight(wide_dlogits, active, reversed_tap), 2 * rounding * w2_size + tiny),
    }
    for name, beyond in (("table", count + padding), ("bias", count)):
        assert not exact[name][0][beyond:].any()
        exact[name] = (exact[name][0][:beyond], exact[name][1][:beyond])
    exact["scores"] = (dscores[..., left:], exact["scores"][1][..., left:])
    return exact


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


@pytest.mark.parametrize("case", [*CASES, LINEAR_CASE], ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_gradients_are_those_of_float64_and_no_access_is_wrong(case: Case, shape: Shape, seed: int) -> None:
    check_gradients(case, shape, seed)


@pytest.mark.parametrize("case", LOCAL_CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(shape=LOCAL_SHAPES, seed=st.integers(0, 1000))
def test_gradients_of_windows_and_documents_are_those_of_float64(case: Case, shape: Shape, seed: int) -> None:
    check_gradients(case, shape, seed)


@pytest.mark.parametrize("case", LOCAL_CASES, ids=str)
def test_gradients_where_windows_and_documents_begin_are_those_of_float64(case: Case) -> None:
    for shape in LOCAL_EXAMPLES:
        check_gradients(case, shape)


def check_gradients(case: Case, shape: Shape, seed: int = 0) -> None:
    shape = case.adapt(shape)
    inputs, dlogits = build_inputs(shape, seed)
    found, faults = run(inputs, dlogits, Launcher(), case)
    assert faults.errors == NO_ERRORS, faults
    for name, (true, bound) in compute_truth(inputs, dlogits, shape).items():
        error = (found[name].double() - true).abs()
        assert (error <= bound).all(), (name, (error / bound.clamp(min=1e-30)).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_order_of_warps_changes_no_bit(launcher: Launcher, case: Case) -> None:
    inputs, dlogits = build_inputs(case.adapt(Shape(1, 12, 32, 72, 0)))
    found, _ = run(inputs, dlogits, launcher, case)
    again, faults = run(inputs, dlogits, Launcher(backwards=True), case)
    assert faults.errors == NO_ERRORS
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("shape", [Shape(1, 9, 20, 40, 16), Shape(1, 12, 32, 72, 64, 33)])
def test_gradients_are_the_same_among_several_layers_in_a_chunk_of_a_longer_call(
    launcher: Launcher, shape: Shape
) -> None:
    inputs, dlogits = build_inputs(shape)
    found, _ = run(inputs, dlogits, launcher)
    again, faults = run(move_into_longer_call(inputs), dlogits, launcher)
    assert faults.errors == NO_ERRORS, faults
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_memory_has_few_bank_conflicts(launcher: Launcher, case: Case) -> None:
    inputs, dlogits = build_inputs(case.adapt(Shape(1, 16, 32, 128, 0)))
    _, faults = run(inputs, dlogits, launcher, case)
    assert faults.clocks < 1.1 * faults.accesses


SCORES, WEIGHTS = ", true, false>", ", false, true>"
"""Ends of the names of the kernels for dS and for the weights' gradients, one of which has each fault."""
FAULTS = {
    "a missing barrier": (WEIGHTS, "first, sums);\n    barrier(memory);\n    if", "first, sums);\n    if"),
    "sums over dS that is read": (SCORES, "        barrier(memory);\n        store_sums", "        store_sums"),
    "sums that are read too early": (SCORES, "sums, 0);\n        barrier(memory);\n", "sums, 0);\n"),
    "a wrong lane": (WEIGHTS, "a[1] = transpose_8x8(x[2]);", "a[1] = transpose_8x8(x[1]);"),
    "a wrong edge": (SCORES, "j >= 0 && j + x <= last", "j >= 0 && j + x <= last + 1"),
    "a wrong distance": (SCORES, "- (G::COLUMNS - 1);", "- G::COLUMNS;"),
    "copies in flight": (WEIGHTS, "    else wait_for_copies(c.dlogits);\n", ""),
}
LOCAL_FAULTS = {
    "a gradient beyond the window": (WEIGHTS, "select(j + x >= begin, v.x[x]", "select(j + x >= begin - 1, v.x[x]"),
    "a gradient before the document": (SCORES, "gradient[n][x] = select(is_inside,", "gradient[n][x] = select(true,"),
    "hidden values before the document": (WEIGHTS, "hidden[n][x] = select(is_inside,", "hidden[n][x] = select(true,"),
    "E among distances": (SCORES, "select(T::is_at_edge(places, r, hidden_column + jj)", "select(false"),
    "another row's edge": (SCORES, "T::locate_edge(places.row[r],", "T::locate_edge(places.of_row[r],"),
    "a wrong last tile": (SCORES, "MASKED && tile + 1 == c.tiles.end", "MASKED && tile == c.tiles.end"),
    "words that are not cleared": (WEIGHTS, "      Inputs::clear_columns(c);\n", ""),
    "stores left of the map": (SCORES, "is_stored = is_stored && j >= 0;", ""),
}
SLICE_FAULTS = {
    "another slice's widths": (WEIGHTS, "before[0][r] = slice % 2 ? before[1][r] : before[0][r];", ""),
    "another slice's distances": (SCORES, "group, first_step);", "group, 0);"),
    "another slice's place": (WEIGHTS, "c.slice * N_TILES + fragment % N_TILES", "fragment % N_TILES"),
    "without earlier slices": (SCORES, "else if (!EDGE) add_words(sum, others[jj % 4].part, unit);", ""),
}
LOCAL_FAULT_SHAPE = Shape(1, 16, 32, 96, 160, 128, frozenset({226, 240}))
ONE_TOKEN_DOCUMENTS = Shape(1, 16, 32, 16, 0, None, frozenset(range(1, 16)))


def find_fault_shape(name: str) -> Shape:
    if name in FAULTS or name in SLICE_FAULTS:
        return Shape(1, 16, 32, 96, 0)  # the middle of three tiles has no masks
    return ONE_TOKEN_DOCUMENTS if name.endswith("document") else LOCAL_FAULT_SHAPE


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, *LOCAL_FAULTS, *SLICE_FAULTS])
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    fault = plant_fault(tmp_path / "cuda", *(FAULTS | LOCAL_FAULTS | SLICE_FAULTS)[name])
    case = SEVEN_TAPS if name in SLICE_FAULTS else CASES[0]
    shape = case.adapt(find_fault_shape(name))
    inputs, dlogits = build_inputs(shape)
    found, faults = run(inputs, dlogits, Launcher(fault), case)
    truth = compute_truth(inputs, dlogits, shape)
    is_wrong = any(not ((found[key].double() - true).abs() <= bound).all() for key, (true, bound) in truth.items())
    assert is_wrong or faults.errors != NO_ERRORS


def test_supported_shapes_are_reported_as_supported() -> None:
    shape = get_weight_shape(16, 32, 3, True)
    assert mixer.is_supported(shape, torch.bfloat16, 64, 512)
    assert mixer.is_supported(shape, torch.float16, 80, 512)
    assert mixer.is_supported(get_weight_shape(8, 32, 3, True), torch.bfloat16, 64, 512)
    assert mixer.is_supported(get_weight_shape(16, 16, 3, True), torch.bfloat16, 64, 512)
    assert mixer.is_supported(get_weight_shape(16, 32, 1, True), torch.bfloat16, 64, 512)
    assert mixer.is_supported(get_weight_shape(16, 32, 7, True), torch.bfloat16, 64, 512)
    assert mixer.is_supported(get_weight_shape(16, 64, 5, True), torch.bfloat16, 64, 512)
    for other, dtype, dim, columns in (
        (get_weight_shape(16, 32, 9, True), torch.bfloat16, 64, 512),
        (get_weight_shape(17, 32, 3, True), torch.bfloat16, 64, 512),
        (get_weight_shape(16, 65, 3, True), torch.bfloat16, 64, 512),
        (get_weight_shape(16, 33, 7, True), torch.bfloat16, 64, 512),
        (get_weight_shape(8, 33, 3, True), torch.bfloat16, 64, 512),
        (get_weight_shape(8, 16, 3, True), torch.bfloat16, 64, 512),
        (shape, torch.float32, 64, 512),
        (shape, torch.bfloat16, 72, 512),
        (shape, torch.bfloat16, 144, 512),
        (shape, torch.bfloat16, 64, 511),
    ):
        assert not mixer.is_supported(other, dtype, dim, columns)


def test_logits_are_supported_for_more_shapes() -> None:
    limits = logit_kernels.LOGIT_KERNELS.limits
    for heads, width, kernel_size, is_supported in (
        *((16, 32, 7, True), (16, 33, 7, False), (17, 32, 5, False), (16, 32, 9, False)),
        *((16, 64, 3, True), (9, 33, 1, True), (8, 33, 3, False), (16, 65, 3, False)),
        *((32, 32, 3, True), (17, 8, 1, True), (32, 33, 3, False), (33, 32, 3, False)),
    ):
        shape = get_weight_shape(heads, width, kernel_size, True)
        assert mixer.is_supported(shape, torch.bfloat16, 64, 512, limits) == is_supported


@pytest.mark.parametrize(
    ("family", "arch", "tiles"),
    [
        # Of heads of 64, 80, 96 and 128: rows, columns, held tensors, and blocks on a multiprocessor.
        *((ATTENTION_KERNELS, arch, [(32, 32, 1, 1), *[(16, 64, 1, 1)] * 3]) for arch in (80, 90)),
        (logit_kernels.LOGIT_KERNELS, 80, [(32, 32, 1, 1), (16, 64, 1, 1), (16, 64, 1, 1), (16, 64, 1, 1)]),
        (logit_kernels.LOGIT_KERNELS, 90, [(32, 16, 1, 2), (32, 32, 1, 1), (32, 32, 1, 1), (32, 32, 1, 1)]),
        (logit_kernels.LOGIT_GRADIENT_KERNELS, 80, [(16, 64, 2, 1), (16, 64, 1, 1), (16, 64, 1, 1), (16, 64, 1, 1)]),
        (logit_kernels.LOGIT_GRADIENT_KERNELS, 90, [(32, 32, 2, 1), (16, 64, 2, 1), (16, 64, 2, 1), (16, 64, 2, 1)]),
        (mixer.SCORE_GRADIENT_KERNELS, 80, [(16, 64, 1, 1), (16, 32, 1, 1), (16, 32, 1, 1), (16, 32, 1, 1)]),
        (mixer.SCORE_GRADIENT_KERNELS, 90, [*[(32, 32, 1, 1)] * 3, (16, 64, 1, 1)]),
        (mixer.WEIGHT_GRADIENT_KERNELS, 80, [(32, 32, 1, 1), (16, 64, 1, 1), (16, 64, 1, 1), (16, 64, 1, 1)]),
        (mixer.WEIGHT_GRADIENT_KERNELS, 90, [(32, 32, 1, 1)] * 4),
        (logit_kernels.LOGIT_KERNELS, 89, [None] * 4),
    ],
    ids=str,
)
def test_the_geometry_fits_the_gpu(family: KernelFamily, arch: int, tiles: list[tuple[int, ...] | None]) -> None:
    kernels = [choose_kernel(family, KernelForm(3, dim, torch.bfloat16), arch) for dim in (64, 80, 96, 128)]
    assert [kernel and (*kernel.tile, kernel.resident_blocks) for kernel in kernels] == tiles


@pytest.mark.parametrize(
    ("arch", "dim", "sizes", "tile"),
    [
        (80, 64, (3, 16, 64), (32, 32, 1, 1)),
        (90, 64, (3, 16, 64), (32, 16, 1, 2)),
        (80, 64, (3, 32, 32), (16, 32, 1, 1)),
        (90, 64, (3, 32, 32), (32, 16, 1, 1)),
        (80, 80, (3, 32, 32), None),
        (90, 80, (3, 32, 32), (16, 32, 1, 1)),
        (80, 64, (5, 16, 32), (16, 64, 1, 1)),
        (90, 64, (5, 16, 32), (32, 32, 1, 1)),
        (80, 128, (7, 16, 32), (16, 32, 1, 1)),
        (90, 64, (7, 16, 32), (32, 32, 1, 1)),
    ],
    ids=str,
)
def test_the_geometry_of_more_heads_widths_and_taps_fits_the_gpu(
    arch: int, dim: int, sizes: tuple[int, int, int], tile: tuple[int, ...] | None
) -> None:
    kernel_size, heads, width = sizes
    form = KernelForm(kernel_size, dim, torch.bfloat16, heads=heads, width=width)
    kernel = choose_kernel(logit_kernels.LOGIT_KERNELS, form, arch)
    assert (kernel and (*kernel.tile, kernel.resident_blocks)) == tile


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("kernel_size", "width"), [(1, 32), (3, 32), (5, 32), (7, 32), (3, 64), (5, 64)])
def test_some_tile_of_each_kernel_fits_a_gpu(arch: int, kernel_size: int, width: int) -> None:
    for family in (ATTENTION_KERNELS, logit_kernels.LOGIT_KERNELS, *mixer_chunks.BACKWARD_KERNELS):
        for dim in range(16, 129, 16):
            form = KernelForm(kernel_size, dim, torch.bfloat16, width=width)
            fits = choose_kernel(family, form, arch) is not None
            assert fits != ((arch, kernel_size, width, dim) in TOO_LARGE.get(family, ())), (family.name, dim)


@pytest.mark.parametrize("chunk_rows", [24, 40])
def test_sums_of_layers_and_chunks_are_those_of_float64(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's gradients are found among those of all layers, which one or two chunks of rows leave for them.

    With one chunk, layers share the tables of partial sums.
    """
    shape, layers = Shape(1, 12, 20, 40, 0), 2
    calls, gradients = zip(*(build_inputs(shape, seed) for seed in range(layers)), strict=True)
    operands = [call.operands for call in calls]
    product = get_bias_product(operands[0].shape, shape.rows, 0, None, torch.bfloat16)
    contributions = torch.cat([torch.cat([x.contributions, x.edge.flatten(1, 2)], 1) for x in operands])
    biases = torch.cat([x.bias_table for x in operands])
    packed = PackedWeights(*(torch.cat(pair) for pair in zip(*(x.weights for x in operands), strict=True)))
    problems = build_problems(product, contributions, biases, packed, residual_bias=True)
    launcher = Launcher()
    monkeypatch.setattr(mixer_chunks, "launch_kernel", launcher)
    kernels = (
        CASES[0].build(mixer.SCORE_GRADIENT_KERNELS, calls[0]),
        CASES[0].build(mixer.WEIGHT_GRADIENT_KERNELS, calls[0]),
    )
    watched = [x for call in calls for x in (call.queries, call.keys)]
    with launcher.watch(watched):
        launcher.emulator.register(contributions)
        sums = add_mixer_sums(
            allocate_term_sums(layers, product, shape.columns, torch.get_default_device()), problems[0]
        )
        for call, dlogits, problem in zip(calls, gradients, problems, strict=True):
            own = sums.select_layer(problem.layer)
            for chunk in reversed(list_chunks(problem, chunk_rows)):
                of_chunk = dlogits[:, chunk.first : chunk.last, :, : chunk.right].contiguous()
                launcher.emulator.register(of_chunk)
                inputs = mixer_chunks.build_logit_inputs(problem, chunk, call.queries, call.keys)
                of_layer = problem, product, chunk, inputs, of_chunk, own
                _, pairs = mixer_chunks.differentiate_mixer_of_layer(*of_layer, kernels)
                for total, partial in pairs:
                    rows, columns = (min(sizes) for sizes in zip(total.shape, partial.shape[1:], strict=True))
                    total[:rows, :columns] += partial[:, :rows, :columns].sum(0)
    assert launcher.emulator.get_faults().errors == NO_ERRORS
    assert sums.mixer is not None
    assert (sums.mixer.shared._tables is None) == (chunk_rows < shape.rows)
    unpack_mixer_sums(sums, product)
    for layer, (call, dlogits) in enumerate(zip(calls, gradients, strict=True)):
        gradient, by_tap = (
            sums.bias_product[layer],
            sums.patches[layer][:, : shape.taps * 16].view(2, shape.taps, 16, -1),
        )
        by_tap = by_tap[:, :, : shape.heads, : shape.width]
        found = {
            "table": gradient[: shape.columns + shape.padding, : shape.width],
            "bias": sums.bias_table[layer],
            "edge": product._select_edge(gradient, 0)[None, :, None],
            "w1": by_tap[0],
            "w2": by_tap[1].flip(0),
        }
        truth = compute_truth(call, dlogits, shape)
        assert all(((found[name].double() - truth[name][0]).abs() <= truth[name][1]).all() for name in found)
