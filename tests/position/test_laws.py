"""Laws that every encoding and processor of the registry obeys, alone and together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from position_methods import ALL, MAPPED, RELATIVE, SHAPE, build, output, random_qkv

from megatron.model.backends.backend import Rows
from megatron.model.backends.chunked import Chunked
from megatron.model.backends.eager import Eager
from megatron.position import registry
from megatron.position.processors.cdape import Cdape
from megatron.position.scores import distances
from megatron.position.shape import Shape, Span

TOLERANCE = 5e-6  # float32 sums of a few dozen terms of order one, in another order

TABLES = [name for name in registry.encodings() if registry.encoding_class(name).overrides("table")]
LEARNED_TABLES = [name for name in TABLES if list(build(name, "none")[0].parameters())]

lengths = st.integers(2, 40)


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
@given(length=lengths, data=st.data())
def test_no_output_and_no_gradient_reaches_a_future_token(encoding: str, processor: str, length: int, data) -> None:
    e, p = build(encoding, processor)
    row = data.draw(st.integers(0, length - 2))
    q, k, v = random_qkv(length)
    k.requires_grad_(), v.requires_grad_()
    out = output(q, k, v, Span(0, length), Span(0, length), e, p)
    out[:, :, : row + 1].square().sum().backward()
    assert k.grad[:, :, row + 1 :].abs().max() == 0
    assert v.grad[:, :, row + 1 :].abs().max() == 0
    with torch.no_grad():
        k2, v2 = k.clone(), v.clone()
        k2[:, :, row + 1 :] += 100
        v2[:, :, row + 1 :] -= 100
        changed = output(q, k2, v2, Span(0, length), Span(0, length), e, p)
    assert torch.equal(changed[:, :, : row + 1], out[:, :, : row + 1])


class LeakyCdape(Cdape):
    """CDAPE without tril: the published appendix D shows that it cheats."""

    def forward(self, scores, bias, visible):
        return super().forward(scores, bias, torch.ones_like(visible))


def test_the_causality_law_catches_a_processor_without_tril() -> None:
    e, _ = build("kerple_log", "none")
    p = LeakyCdape(SHAPE, has_bias=True)
    q, k, v = random_qkv(9)
    k.requires_grad_()
    output(q, k, v, Span(0, 9), Span(0, 9), e, p)[:, :, :5].square().sum().backward()
    assert k.grad[:, :, 5:].abs().max() > 0


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
@given(length=lengths, data=st.data())
def test_a_row_depends_neither_on_T_nor_on_the_rows_beside_it(encoding, processor, length: int, data) -> None:
    """The same law makes cached decoding and sharding by rows exact."""
    e, p = build(encoding, processor)
    q, k, v = random_qkv(length)
    whole = output(q, k, v, Span(0, length), Span(0, length), e, p)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    rows = output(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], Span(start, stop - start), Span(0, stop), e, p)
    torch.testing.assert_close(rows, whole[:, :, start:stop], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("encoding", "processor"), [pair for pair in RELATIVE if pair in MAPPED])
@given(length=st.integers(2, 24), offset=st.integers(1, 5000))
def test_moving_all_positions_changes_nothing(encoding: str, processor: str, length: int, offset: int) -> None:
    e, p = build(encoding, processor)
    q, k, v = random_qkv(length)
    here = output(q, k, v, Span(0, length), Span(0, length), e, p)
    there = output(q, k, v, Span(offset, length), Span(offset, length), e, p)
    torch.testing.assert_close(here, there, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
def test_32_times_the_training_length_is_finite(encoding: str, processor: str) -> None:
    e, p = build(encoding, processor)
    length = 32 * SHAPE.train_length
    q, k, v = random_qkv(length, batch=1)
    assert output(q, k, v, Span(0, length), Span(0, length), e, p).isfinite().all()


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
def test_chunked_equals_eager_in_outputs_and_all_gradients(encoding: str, processor: str) -> None:
    """In float64, where equal means equal: the two only sum in another order."""
    length = 37
    e, p = build(encoding, processor)
    e, p = e.double(), p.double() if p is not None else None
    q, k, v = random_qkv(length, dtype=torch.float64)
    seed = torch.randn_like(v)
    results = []
    for backend in (Eager(), Chunked(11)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        span = Span(0, length)
        out = backend(Rows(*inputs, query=span, key=span, encoding=e, processor=p))
        parameters = [*e.parameters(), *(p.parameters() if p is not None else ())]
        grads = torch.autograd.grad((out * seed).sum(), [*inputs, *parameters], allow_unused=True)
        results.append([out, *(g for g in grads if g is not None)])
    terms = 2 * length * length  # the most that any gradient sums
    for eager, chunked in zip(*results, strict=True):
        scale = max(eager.abs().max().item(), 1.0)
        assert (eager - chunked).abs().max() <= terms * torch.finfo(torch.float64).eps * scale


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
def test_bfloat16_errs_like_plain_bfloat16_in_both_backends(encoding: str, processor: str) -> None:
    length = 37
    span = Span(0, length)
    e, p = build(encoding, processor)
    q, k, v = random_qkv(length, dtype=torch.bfloat16)
    e, p = e.bfloat16(), p.bfloat16() if p is not None else None
    outs = [b(Rows(q, k, v, span, span, e, p)).double() for b in (Eager(), Chunked(11))]
    e, p = e.double(), p.double() if p is not None else None
    exact = Eager()(Rows(q.double(), k.double(), v.double(), span, span, e, p))
    errors = [(out - exact).abs().max().item() for out in outs]
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.bfloat16).eps
    assert errors[0] <= 0.1


@pytest.mark.parametrize("name", TABLES)
def test_a_half_precision_model_has_the_float32_bias_at_any_distance(name: str) -> None:
    e, _ = build(name, "none")
    far = distances(65_537)[-3:]
    exact = e.table(far)
    for dtype in (torch.bfloat16, torch.float16):
        half, _ = build(name, "none")
        half.load_state_dict(e.state_dict())
        half = half.to(dtype)
        full, _ = build(name, "none")
        full.load_state_dict(half.state_dict())  # the rounded parameters, computed with in float32
        for ours, reference in zip(half.table(far), full.table(far), strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                assert ours.dtype == torch.float32
                assert torch.equal(ours, reference)
                assert ours.isfinite().all()
    assert all(term is None or term.isfinite().all() for term in exact)


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
def test_float16_stays_finite_at_distance_65536(encoding: str, processor: str) -> None:
    shape = Shape(2, 4, 8, 16, 16)
    e, p = build(encoding, processor, shape)
    for parameter in e.parameters():  # the steepest bias that the bounds allow
        parameter.data.clamp_(min=2.0)
    e, p = e.half(), p.half() if p is not None else None
    q, k, v = random_qkv(65_537, shape, batch=1, dtype=torch.float16)
    last = output(q[:, :, -1:], k, v, Span(65_536, 1), Span(0, 65_537), e, p)
    assert last.isfinite().all()


@pytest.mark.parametrize("name", LEARNED_TABLES)
def test_gradients_are_finite_where_the_distance_is_zero(name: str) -> None:
    e, _ = build(name, "none")
    terms = [term for term in e.table(distances(3)) if term is not None]
    for term in terms:
        term[:, 0].sum().backward(retain_graph=True)
    assert all(p.grad.isfinite().all() for p in e.parameters())


@pytest.mark.parametrize(("encoding", "processor"), ALL)
def test_state_round_trip(encoding: str, processor: str) -> None:
    e, p = build(encoding, processor)
    e2, p2 = build(encoding, processor)
    e2.load_state_dict(e.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(e.parameters(), e2.parameters(), strict=True))
    if p is not None:
        p2.load_state_dict(p.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(p.parameters(), p2.parameters(), strict=True))
