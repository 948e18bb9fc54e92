"""Documents of a packed row are read as if each were alone: by every method, backend and division of the work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_methods import MAPPED, build, random_qkv
from torch import Tensor

from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend, RowBlockBackend, SdpaBackend
from megatron.attention.documents import depends_on_document_start
from megatron.attention.inputs import AttentionInputs
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange

MASKED = [pair for pair in MAPPED if not depends_on_document_start(build(pair[0], "none")[0])]
few_shapes = settings(max_examples=5)
"""For laws that are tried with every pair."""
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
"""Of the documents of a row."""


def assert_equal_in_float64(found: Tensor, expected: Tensor) -> None:
    """To the rounding of a few hundred sums of numbers of order one."""
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def pack(lengths: list[list[int]]) -> list[list[tuple[int, int]]]:
    """First column and length of each document of each row; the last one of a row fills it up."""
    total = max(sum(row) for row in lengths)
    rows = []
    for row in lengths:
        row = [*row[:-1], row[-1] + total - sum(row)]
        rows.append([(sum(row[:index]), length) for index, length in enumerate(row)])
    return rows


def first_keys_of(rows: list[list[tuple[int, int]]]) -> Tensor:
    return torch.tensor([[start for start, length in row for _ in range(length)] for row in rows], dtype=torch.int32)


def attend_alone(
    rows: list[list[tuple[int, int]]], qkv: tuple[Tensor, ...], e: Encoding, p: Processor | None, window: int | None
) -> Tensor:
    """Each document by itself, its tokens from index 0."""
    output = torch.empty_like(qkv[0])
    for b, row in enumerate(rows):
        for start, length in row:
            q, k, v = (x[b : b + 1, :, start : start + length] for x in qkv)
            span = TokenRange(0, length)
            inputs = AttentionInputs(e.rotate(q, span), e.rotate(k, span), v, span, span, e, p, window=window)
            output[b, :, start : start + length] = EagerBackend()(inputs)[0]
    return output


@pytest.mark.parametrize(("encoding", "processor"), MASKED)
@few_shapes
@given(lengths=st.lists(row_lengths, min_size=2, max_size=2), window=st.sampled_from([None, 2, 5]), data=st.data())
def test_rows_with_first_keys_equal_each_document_alone(encoding, processor, lengths, window, data) -> None:
    """In outputs and in all gradients, with every backend in plain PyTorch and with any rows of the whole."""
    e, p = (None if module is None else module.double() for module in build(encoding, processor))
    rows = pack(lengths)
    first_keys = first_keys_of(rows)
    total = first_keys.shape[1]
    qkv = [x.requires_grad_() for x in random_qkv(total, dtype=torch.float64)]
    parameters = [*e.parameters(), *(() if p is None else p.parameters())]
    upstream = torch.randn_like(qkv[0])

    def gradients(output: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(output, [*qkv, *parameters], upstream, allow_unused=True, materialize_grads=True)
        return [output, *found]

    alone = gradients(attend_alone(rows, qkv, e, p, window))
    span = TokenRange(0, total)
    backends = [EagerBackend(), ChunkedBackend(data.draw(st.integers(1, 7))), RowBlockBackend(4)]
    if SdpaBackend().unsupported_reason(e, p) is None:
        backends.append(SdpaBackend())
    for backend in backends:
        q, k, v = e.rotate(qkv[0], span), e.rotate(qkv[1], span), qkv[2]
        inputs = AttentionInputs(q, k, v, span, span, e, p, window=window, first_keys=first_keys)
        for found, expected in zip(gradients(backend(inputs)), alone, strict=True):
            assert_equal_in_float64(found, expected)
    start = data.draw(st.integers(0, total - 1))
    some = inputs.select_rows(start, total)
    assert_equal_in_float64(EagerBackend()(some), alone[0][:, :, start:])


@pytest.mark.parametrize(("encoding", "processor"), MASKED)
@few_shapes
@given(first=st.integers(1, 8), second=st.integers(1, 8), third=st.integers(1, 8))
def test_nothing_of_a_document_reaches_another(encoding, processor, first: int, second: int, third: int) -> None:
    """To the bit: also through the hidden maps of a convolution, whose window crosses the boundary."""
    e, p = build(encoding, processor)
    rows = pack([[first, second, third]] * 2)
    total, span = first + second + third, TokenRange(0, first + second + third)
    q, k, v = random_qkv(total)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, :first] += 100 * torch.randn_like(x[:, :, :first])
        x[:, :, first + second :] -= 50
    middle = slice(first, first + second)
    backends = [EagerBackend(), ChunkedBackend(3)]
    if SdpaBackend().unsupported_reason(e, p) is None:
        backends.append(SdpaBackend())
    for backend in backends:
        here, there = (
            backend(AttentionInputs(*each, span, span, e, p, first_keys=first_keys_of(rows)))
            for each in ((q, k, v), changed)
        )
        assert torch.equal(here[:, :, middle], there[:, :, middle])


def test_only_what_depends_on_absolute_positions_is_left_out() -> None:
    left_out = {name for name in registry.list_encodings() if depends_on_document_start(build(name, "none")[0])}
    assert left_out == {"fire"}
