"""Laws of every encoding and processor in the registry, alone and combined."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_methods import ALL, MAPPED, RELATIVE, SHAPE, build, inputs_of, output, random_qkv, reads_first_token
from torch import Tensor

from megatron.attention.backends.backend import AttentionFormula
from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend, SdpaBackend
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import (
    build_distances,
    compute_attention,
    compute_logits,
    compute_table,
    compute_table_of_ranges,
    compute_tables_of_layers,
)
from megatron.position import registry
from megatron.position.facts import AttentionDims
from megatron.position.processors.cdape import Cdape
from megatron.position.token_range import ALL_HEADS, SampledPositions, TokenRange, sample_positions
from tools.tolerances import SAFETY_FACTOR, assert_close_in_rounding, assert_within_rounding, compute_error_ratio

# CDAPE's second convolution has the longest sum for these shapes. At most five sums follow each other: rotated keys,
# scores, two convolutions, values. Values and scores are of order one.
TERMS, SUMS = 32 * 3, 5

TABLES = [name for name in registry.list_encodings() if registry.load_encoding_class(name).overrides_hook("table")]
LEARNED_TABLES = [name for name in TABLES if list(build(name, "none")[0].parameters())]


def mark_slow(pairs: list[tuple[str, str]]) -> list[Any]:
    """Mark pairs that `make test-fast` skips; it tests every encoding alone, and every processor with one encoding."""
    return [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] != "none" and pair[0] != "kerple_log" else [])
        for pair in pairs
    ]


lengths = st.integers(2, 40)
few_shapes = settings(max_examples=6)
"""For laws tested with every pair: code that depends on a shape is shared by many pairs."""


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
@few_shapes
@given(length=lengths, data=st.data())
def test_no_output_and_no_gradient_reaches_a_future_token(encoding: str, processor: str, length: int, data) -> None:
    e, p = build(encoding, processor)
    row = data.draw(st.integers(0, length - 2))
    q, k, v = random_qkv(length)
    k.requires_grad_(), v.requires_grad_()
    out = output(q, k, v, TokenRange(0, length), TokenRange(0, length), e, p)
    out[:, :, : row + 1].square().sum().backward()
    assert k.grad[:, :, row + 1 :].abs().max() == 0
    assert v.grad[:, :, row + 1 :].abs().max() == 0
    with torch.no_grad():
        k2, v2 = k.clone(), v.clone()
        k2[:, :, row + 1 :] += 100
        v2[:, :, row + 1 :] -= 100
        changed = output(q, k2, v2, TokenRange(0, length), TokenRange(0, length), e, p)
    assert torch.equal(changed[:, :, : row + 1], out[:, :, : row + 1])


class LeakyCdape(Cdape):
    """CDAPE without tril, which leaks future tokens according to the published appendix D."""

    def forward(self, scores, bias, visible, heads=ALL_HEADS, bias_contribution=None):
        return super().forward(scores, bias, torch.ones_like(visible), heads)


def test_the_causality_law_catches_a_processor_without_tril() -> None:
    e, _ = build("kerple_log", "none")
    p = LeakyCdape(SHAPE, has_bias=True)
    q, k, v = random_qkv(9)
    k.requires_grad_()
    output(q, k, v, TokenRange(0, 9), TokenRange(0, 9), e, p)[:, :, :5].square().sum().backward()
    assert k.grad[:, :, 5:].abs().max() > 0


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
@few_shapes
@given(length=lengths, data=st.data())
def test_a_row_depends_neither_on_T_nor_on_other_rows(encoding, processor, length: int, data) -> None:
    """A row depends neither on T nor on other rows. This law makes cached decoding and row sharding exact."""
    e, p = build(encoding, processor)
    q, k, v = random_qkv(length)
    whole = output(q, k, v, TokenRange(0, length), TokenRange(0, length), e, p)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    rows = output(
        q[:, :, :stop],
        k[:, :, :stop],
        v[:, :, :stop],
        TokenRange(start, stop - start),
        TokenRange(0, stop),
        e,
        p,
    )
    assert_close_in_rounding(rows, whole[:, :, start:stop], TERMS, SUMS)


@pytest.mark.parametrize(
    ("encoding", "processor"),
    mark_slow([pair for pair in RELATIVE if pair in MAPPED and not reads_first_token(pair[1])]),
)
@few_shapes
@given(length=st.integers(2, 24), offset=st.integers(1, 5000))
def test_moving_all_positions_changes_nothing(encoding: str, processor: str, length: int, offset: int) -> None:
    e, p = build(encoding, processor)
    q, k, v = random_qkv(length)
    here = output(q, k, v, TokenRange(0, length), TokenRange(0, length), e, p)
    there = output(q, k, v, TokenRange(offset, length), TokenRange(offset, length), e, p)
    assert_close_in_rounding(here, there, TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
@few_shapes
@given(length=st.integers(2, 30), window=st.integers(1, 12), data=st.data())
def test_a_window_masks_earlier_keys(encoding, processor, length: int, window: int, data) -> None:
    """No output and no gradient depends on keys before the window, and every key in the window counts."""
    e, p = build(encoding, processor)
    e, p = e.double(), p.double() if p is not None else None  # the smallest softmax weight is not zero here
    row = data.draw(st.integers(0, length - 1))
    q, k, v = random_qkv(length, dtype=torch.float64)
    k.requires_grad_(), v.requires_grad_()
    span = TokenRange(0, length)
    output(q, k, v, span, span, e, p, window)[:, :, row].square().sum().backward()
    first = max(row - window + 1, 0)
    assert v.grad[:, :, :first].abs().max() == 0 if first else True
    first_read = max(first - (0 if p is None else p.preceding_rows), 0)
    assert k.grad[:, :, :first_read].abs().max() == 0 if first_read else True
    assert v.grad[:, :, first : row + 1].abs().amin((0, 1, 3)).min() > 0
    wide = output(q, k, v, span, span, e, p, length)
    assert torch.equal(wide, output(q, k, v, span, span, e, p))


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
@few_shapes
@given(length=st.integers(1, 30), window=st.integers(1, 12), block=st.integers(1, 9))
def test_skipping_blocks_outside_the_window_changes_nothing(encoding, processor, length, window, block) -> None:
    """Skipping blocks outside the window changes nothing.

    CDAPE's hidden map uses masked columns, so skipping too many would show.
    """
    e, p = build(encoding, processor)
    e, p = e.double(), p.double() if p is not None else None
    q, k, v = random_qkv(length, dtype=torch.float64)
    span = TokenRange(0, length)
    rows = inputs_of(q, k, v, span, span, e, p, window=window)
    assert_close_in_rounding(ChunkedBackend(block)(rows), EagerBackend()(rows), TERMS, SUMS)
    if SdpaBackend().describe_unsupported(AttentionFormula(e, p)) is None:
        assert_close_in_rounding(SdpaBackend()(rows), EagerBackend()(rows), TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
@few_shapes
@given(length=st.integers(1, 20), spread=st.integers(1, 9), data=st.data())
def test_sampled_positions_reach_the_method(encoding, processor, length: int, spread: int, data) -> None:
    """Consecutive positions equal an offset; other positions equal a longer sequence without the omitted tokens.

    The second property needs a processor that does not mix adjacent keys.
    """
    e, p = build(encoding, processor)
    q, k, v = random_qkv(length)
    start = data.draw(st.integers(0, 30))
    run = SampledPositions(torch.arange(start, start + length), start + length)
    whole = output(q, k, v, TokenRange(0, length, run), TokenRange(0, length, run), e, p)
    if e.takes_positions and not reads_first_token(processor):
        moved = TokenRange(start, length)
        assert_close_in_rounding(whole, output(q, k, v, moved, moved, e, p), TERMS, SUMS)
    drawn = sample_positions(length, length + spread, seed=data.draw(st.integers(0, 2**31)))
    span = TokenRange(0, length, drawn)
    ours = output(q, k, v, span, span, e, p)
    if e.takes_real_positions:
        real = TokenRange(0, length, SampledPositions(drawn.values.double(), drawn.limit))
        assert_close_in_rounding(ours, output(q, k, v, real, real, e, p), TERMS, SUMS)
    if not e.takes_positions:
        assert torch.equal(ours, output(q, k, v, TokenRange(0, length), TokenRange(0, length), e, p))
    elif processor == "none" and not e.overrides_hook("contextual"):
        total = length + spread
        qs, ks, vs = (x.new_zeros(*x.shape[:2], total, x.shape[3]) for x in (q, k, v))
        for long, short in ((qs, q), (ks, k), (vs, v)):
            long[:, :, drawn.values] = short
        present = torch.zeros(2, total, dtype=torch.bool)
        present[:, drawn.values] = True
        every = TokenRange(0, total)
        exact = EagerBackend()(
            inputs_of(e.rotate(qs, every), e.rotate_keys(ks, every), vs, every, every, e, None, key_mask=present)
        )
        assert_close_in_rounding(ours, exact[:, :, drawn.values], TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
def test_drawn_positions_have_the_gradients_of_autograd(encoding: str, processor: str) -> None:
    """Gradients with randomized positions equal autograd's.

    The table's gradient has no diagonals here and is compared with a gather. Blocks equal the whole, and continuous
    positions with integer values equal integer positions.
    """
    length, limit = 13, 40
    e, p = build(encoding, processor)
    e, p = e.double(), p.double() if p is not None else None
    q, k, v = random_qkv(length, dtype=torch.float64)
    span = TokenRange(0, length, sample_positions(length, limit, seed=3))
    calls = [(EagerBackend(), span), (ChunkedBackend(4), span)]
    if e.takes_real_positions:
        calls.append((ChunkedBackend(4), TokenRange(0, length, SampledPositions(span.positions().double(), limit))))
    results = []
    for backend, span in calls:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        parameters = [*e.parameters(), *(p.parameters() if p is not None else ())]
        out = backend(inputs_of(*inputs, span, span, e, p))
        grads = torch.autograd.grad(out.square().sum(), [*inputs, *parameters], allow_unused=True)
        results.append([out, *(g for g in grads if g is not None)])
    for eager, *others in zip(*results, strict=True):
        for other in others:
            assert_close_in_rounding(eager, other, 2 * length * length, 2 * SUMS)


@pytest.mark.parametrize(("encoding", "processor"), [pair for pair in ALL if pair[1] != "none"])
def test_a_rank_with_some_heads_computes_the_same_as_all_heads(encoding: str, processor: str) -> None:
    """A range of heads equals the same range of all heads, which tensor parallelism requires."""
    e, p = build(encoding, processor)
    q, k, _ = random_qkv(11)
    span = TokenRange(0, 11)
    for some in (slice(0, 1), slice(1, 3)):
        ours = compute_logits(inputs_of(q, k, k, span, span, e, p, heads=some))
        assert_close_in_rounding(ours, compute_logits(inputs_of(q, k, k, span, span, e, p))[:, some], TERMS, SUMS)
        own_q, own_k = q[:, some], k[:, some]
        plain = compute_logits(inputs_of(own_q, own_k, own_k, span, span, e, heads=some, all_k=k))
        whole = compute_logits(inputs_of(q, k, k, span, span, e))[:, some]
        assert_close_in_rounding(plain, whole, TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
def test_32_times_the_training_length_is_finite(encoding: str, processor: str) -> None:
    e, p = build(encoding, processor)
    length = 32 * SHAPE.train_length
    q, k, v = random_qkv(length, batch=1)
    assert output(q, k, v, TokenRange(0, length), TokenRange(0, length), e, p).isfinite().all()


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
def test_chunked_equals_eager_in_outputs_and_all_gradients(encoding: str, processor: str) -> None:
    """Chunked equals eager in float64; they differ only in the order of sums."""
    length = 37
    e, p = build(encoding, processor)
    e, p = e.double(), p.double() if p is not None else None
    q, k, v = random_qkv(length, dtype=torch.float64)
    seed = torch.randn_like(v)
    results = []
    for backend in (EagerBackend(), ChunkedBackend(11)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        span = TokenRange(0, length)
        out = backend(inputs_of(*inputs, query=span, key=span, encoding=e, processor=p))
        parameters = [*e.parameters(), *(p.parameters() if p is not None else ())]
        grads = torch.autograd.grad((out * seed).sum(), [*inputs, *parameters], allow_unused=True)
        results.append([out, *(g for g in grads if g is not None)])
    for eager, chunked in zip(*results, strict=True):
        assert_close_in_rounding(eager, chunked, 2 * length * length, 2 * SUMS)  # longest sum of any gradient


def _bfloat16(encoding: str, processor: str, length: int = 37) -> tuple[AttentionInputs, Callable[[], Tensor]]:
    """Return attention in bfloat16, and a float64 computation from the same numbers."""
    span, qkv = TokenRange(0, length), random_qkv(length, dtype=torch.bfloat16)
    e, p = (None if module is None else module.bfloat16() for module in build(encoding, processor))
    exact = [None if module is None else deepcopy(module).double() for module in (e, p)]
    wide = [x.double() for x in qkv]
    return inputs_of(*qkv, span, span, e, p), lambda: EagerBackend()(inputs_of(*wide, span, span, *exact))


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
@torch.no_grad()
def test_bfloat16_errs_by_rounding_alone_in_both_backends(encoding: str, processor: str) -> None:
    """bfloat16 errors are rounding errors: products round inputs and results; bias, softmax and all sums are at least
    float32.
    """
    rows, exact = _bfloat16(encoding, processor)
    found = {"eager": EagerBackend()(rows), "chunked": ChunkedBackend(11)(rows)}
    assert_within_rounding(found, lambda: dict.fromkeys(found, exact()), torch.bfloat16, stored=True)


def _without_far_keys(rows: AttentionInputs) -> Tensor:
    return EagerBackend()(replace(rows, window=rows.key.length // 2))


def _with_distances_off_by_one(rows: AttentionInputs) -> Tensor:
    table = compute_table(rows.encoding, rows.query, rows.key)
    return compute_attention(replace(rows, table=table._replace(bias=table.bias.roll(1, dims=-1))))


def _with_a_nan(rows: AttentionInputs) -> Tensor:
    return EagerBackend()(rows).index_fill(2, torch.tensor(5), torch.nan)


@pytest.mark.parametrize("faulty", [_without_far_keys, _with_distances_off_by_one, _with_a_nan])
@pytest.mark.parametrize("processor", ["none", "cdape"])
@torch.no_grad()
def test_a_fault_in_bfloat16_is_more_than_rounding(faulty: Callable[[AttentionInputs], Tensor], processor: str) -> None:
    rows, exact = _bfloat16("kerple_log", processor)
    errors = compute_error_ratio({"output": faulty(rows)}, lambda: {"output": exact()}, torch.bfloat16, stored=True)
    assert errors["output"] > SAFETY_FACTOR


@pytest.mark.parametrize("name", TABLES)
def test_a_half_precision_model_has_the_float32_bias_at_any_distance(name: str) -> None:
    e, _ = build(name, "none")
    far = build_distances(65_537)[-3:]
    exact = e.table(far)
    for dtype in (torch.bfloat16, torch.float16):
        half, _ = build(name, "none")
        half.load_state_dict(e.state_dict())
        half = half.to(dtype)
        full, _ = build(name, "none")
        full.load_state_dict(half.state_dict())  # the rounded parameters, used in float32
        for ours, reference in zip(half.table(far), full.table(far), strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                assert ours.dtype == torch.float32
                assert torch.equal(ours, reference)
                assert ours.isfinite().all()
    assert all(term is None or term.isfinite().all() for term in exact)


@pytest.mark.parametrize(
    "name", [name for name in registry.list_encodings() if registry.load_encoding_class(name).overrides_hook("dense")]
)
def test_a_half_precision_model_has_a_float32_bias_without_a_table(name: str) -> None:
    query, key = TokenRange(65_534, 3), TokenRange(0, 5)
    for dtype in (torch.bfloat16, torch.float16):
        half, full = (build(name, "none")[0] for _ in range(2))
        half = half.to(dtype)
        full.load_state_dict(half.state_dict())
        ours = half.dense(query, key, torch.zeros(1, dtype=dtype), ALL_HEADS)
        reference = full.dense(query, key, torch.zeros(1), ALL_HEADS)
        for term, exact in zip(ours, reference, strict=True):
            assert (term is None) == (exact is None)
            if term is not None:
                assert term.dtype == torch.float32
                assert torch.equal(term, exact)


@pytest.mark.parametrize(("encoding", "processor"), mark_slow(MAPPED))
def test_float16_stays_finite_at_distance_65536(encoding: str, processor: str) -> None:
    shape = AttentionDims(2, 4, 8, 16, 16)
    e, p = build(encoding, processor, shape)
    for parameter in e.parameters():  # steepest bias within the bounds
        parameter.data.clamp_(min=2.0)
    e, p = e.half(), p.half() if p is not None else None
    q, k, v = random_qkv(65_537, shape, batch=1, dtype=torch.float16)
    last = output(q[:, :, -1:], k, v, TokenRange(65_536, 1), TokenRange(0, 65_537), e, p)
    assert last.isfinite().all()


@pytest.mark.parametrize("name", LEARNED_TABLES)
def test_gradients_are_finite_where_the_distance_is_zero(name: str) -> None:
    e, _ = build(name, "none")
    terms = [term for term in e.table(build_distances(3)) if term is not None]
    for term in terms:
        term[:, 0].sum().backward(retain_graph=True)
    assert all(p.grad.isfinite().all() for p in e.parameters())


@pytest.mark.parametrize("name", [name for name in LEARNED_TABLES if build(name, "none")[0].has_independent_heads])
def test_tables_of_all_layers_match_separate_ones(name: str) -> None:
    encodings = [build(name, "none")[0] for _ in range(3)]
    with torch.no_grad():
        for layer, encoding in enumerate(encodings):
            for parameter in encoding.parameters():  # different in all layers, some outside their bounds
                parameter.copy_(torch.rand_like(parameter) * 3 - 0.5 + layer)
    ranges = [(TokenRange(0, 20), TokenRange(0, 20)), (TokenRange(20, 13), TokenRange(0, 33))]
    together = compute_tables_of_layers(encodings, ranges, None)
    assert together is not None
    assert len(together) == len(encodings)
    for encoding, terms in zip(encodings, together, strict=True):
        alone = compute_table_of_ranges(encoding, ranges)
        parameters = list(encoding.parameters())
        for term, own in zip(terms, alone or (), strict=True):
            assert (term is None) == (own is None)
            if term is not None:
                assert torch.equal(term, own)
                upstream = torch.randn_like(own)
                found = torch.autograd.grad(term, parameters, upstream, retain_graph=True, allow_unused=True)
                for one, expected in zip(
                    found, torch.autograd.grad(own, parameters, upstream, allow_unused=True), strict=True
                ):
                    assert (one is None or not one.any()) if expected is None else torch.allclose(one, expected)


@pytest.mark.parametrize("encoding", registry.list_encodings())
def test_no_encoding_has_a_linear_layer_that_is_used_otherwise(encoding: str) -> None:
    """No encoding contains an nn.Linear, which tools that replace every nn.Linear (peft's `all-linear`, quantization)
    would break.
    """
    built = registry.build_encoding(encoding, AttentionDims(4, 8, 32, 16, 16))
    assert not [module for module in built.modules() if isinstance(module, torch.nn.Linear)]
