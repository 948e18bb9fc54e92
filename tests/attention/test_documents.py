"""Every method, backend and layout computes each document of a packed row as if it were alone."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCABULARY, small_gpt
from position_methods import COVERING, MAPPED, build, inputs_of, random_qkv
from torch import Tensor
from torch.nn.attention import varlen

from megatron.attention.backends import pytorch
from megatron.attention.backends.backend import AttentionFormula, can_mask_documents, depends_on_document_start
from megatron.attention.backends.pytorch import (
    ChunkedBackend,
    EagerBackend,
    PackedDocuments,
    RowBlockBackend,
    SdpaBackend,
    pack_documents,
)
from megatron.attention.documents import find_document_starts, restart_positions
from megatron.attention.inputs import AttentionInputs
from megatron.attention.segments import rotate_segments
from megatron.model.attention import AttentionContext
from megatron.model.gpt import GPT
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange
from megatron.utils.errors import UserError

MASKED = [
    pair
    for pair in MAPPED
    if can_mask_documents(*(parts := build(*pair))[:1], EagerBackend(), parts[1], randomized=False)
]
few_shapes = settings(max_examples=5)
"""For laws tested with every pair."""
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
"""Lengths of the documents of a row."""


def assert_equal_in_float64(found: Tensor, expected: Tensor) -> None:
    """Assert equality up to rounding of a few hundred sums of numbers of order one."""
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def pack(lengths: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return start column and length of each document of each row; the last one fills the row."""
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
    """Compute attention of each document separately, with its tokens numbered from 0."""
    output = torch.empty_like(qkv[0])
    for b, row in enumerate(rows):
        for start, length in row:
            q, k, v = (x[b : b + 1, :, start : start + length] for x in qkv)
            span = TokenRange(0, length)
            inputs = inputs_of(e.rotate(q, span), e.rotate_keys(k, span), v, span, span, e, p, window=window)
            output[b, :, start : start + length] = EagerBackend()(inputs)[0]
    return output


@pytest.mark.parametrize(("encoding", "processor"), MASKED)
@few_shapes
@given(lengths=st.lists(row_lengths, min_size=2, max_size=2), window=st.sampled_from([None, 2, 5]), data=st.data())
def test_rows_with_first_keys_equal_each_document_alone(encoding, processor, lengths, window, data) -> None:
    """Outputs and all gradients match with every PyTorch backend and any subset of rows."""
    e, p = (None if module is None else module.double() for module in build(encoding, processor))
    rows = pack(lengths)
    document_starts = first_keys_of(rows)
    total = document_starts.shape[1]
    qkv = [x.requires_grad_() for x in random_qkv(total, dtype=torch.float64)]
    parameters = [*e.parameters(), *(() if p is None else p.parameters())]
    upstream = torch.randn_like(qkv[0])

    def gradients(output: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(output, [*qkv, *parameters], upstream, allow_unused=True, materialize_grads=True)
        return [output, *found]

    alone = gradients(attend_alone(rows, qkv, e, p, window))
    span = TokenRange(0, total)
    restarted = restart_positions(document_starts.long(), torch.arange(total), torch.device("cpu"))
    backends = [EagerBackend(), ChunkedBackend(data.draw(st.integers(1, 7))), RowBlockBackend(4)]
    if SdpaBackend().describe_unsupported(AttentionFormula(e, p)) is None:
        backends.append(SdpaBackend())
    for backend in backends:
        (q, k), v = rotate_segments(qkv[0], qkv[1], e, (), restarted), qkv[2]
        inputs = inputs_of(q, k, v, span, span, e, p, window=window, document_starts=document_starts)
        for found, expected in zip(gradients(backend(inputs)), alone, strict=True):
            assert_equal_in_float64(found, expected)
    start = data.draw(st.integers(0, total - 1))
    some = inputs.select_rows(start, total)
    assert_equal_in_float64(EagerBackend()(some), alone[0][:, :, start:])


@pytest.mark.parametrize(("encoding", "processor"), MASKED)
@few_shapes
@given(first=st.integers(1, 8), second=st.integers(1, 8), third=st.integers(1, 8))
def test_nothing_of_a_document_reaches_another(encoding, processor, first: int, second: int, third: int) -> None:
    """Documents do not affect each other, bit for bit, even through convolutions whose window crosses the boundary."""
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
    if SdpaBackend().describe_unsupported(AttentionFormula(e, p)) is None:
        backends.append(SdpaBackend())
    for backend in backends:
        here, there = (
            backend(inputs_of(*each, span, span, e, p, document_starts=first_keys_of(rows)))
            for each in ((q, k, v), changed)
        )
        assert torch.equal(here[:, :, middle], there[:, :, middle])


def test_only_methods_with_absolute_positions_are_excluded() -> None:
    left_out = {name for name in registry.list_encodings() if depends_on_document_start(build(name, "none")[0])}
    assert left_out == {"fire"}


LENGTH = 22
CONTINUOUS = {"randomized_positions": LENGTH + 20, "continuous_positions": True}
PACKED = pack([[3, 8, 1, 6, 4], [10, 1, 11], [22]])
"""Documents of three rows: short ones, some longer than a row block, and one that fills its row."""


def read_alone(gpt: GPT, tokens: Tensor, rows: list[list[tuple[int, int]]]) -> Tensor:
    """Return the logits, computed document by document."""
    parts = [[gpt(tokens[b : b + 1, start : start + length]) for start, length in row] for b, row in enumerate(rows)]
    return torch.cat([torch.cat(row, dim=1) for row in parts])


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("encoding", "processor"), COVERING)
def test_a_packed_row_equals_its_separate_documents(encoding: str, processor: str, masked: bool) -> None:
    """A packed row gives the logits and gradients of separate documents, with both masking methods, with and without a
    cache, and for the last tokens only.
    """
    gpt = small_gpt(LENGTH, encoding, processor).double()
    attention = [layer.self_attention.core_attention for layer in gpt.local_layers]
    for each in attention:
        each.backend = RowBlockBackend(8) if masked else each.backend
    first = attention[0]
    if masked and not can_mask_documents(first.encoding, first.backend, first.processor, randomized=False):
        assert encoding == "fire" or first.processor.reads_preceding_rows
        return
    gpt.masks_documents = masked
    tokens = torch.randint(VOCABULARY, (len(PACKED), LENGTH))
    starts, weights = first_keys_of(PACKED).long(), torch.randn(len(PACKED), LENGTH, VOCABULARY, dtype=torch.float64)

    def with_gradients(logits: Tensor) -> list[Tensor]:
        gpt.zero_grad()
        (logits * weights).sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in gpt.parameters()]
        return [logits.detach(), *gradients]

    alone = with_gradients(read_alone(gpt, tokens, PACKED))
    for found, expected in zip(with_gradients(gpt(tokens, document_starts=starts)), alone, strict=True):
        assert_equal_in_float64(found, expected)
    with torch.inference_mode():
        assert_equal_in_float64(gpt(tokens, num_logits=9, document_starts=starts), alone[0][:, -9:])
        cache, outputs = gpt.create_kv_cache(LENGTH), []
        for start, stop in ((0, 2), (2, 13), (13, 14), (14, LENGTH)):
            outputs.append(gpt(tokens[:, start:stop], kv_cache=cache, document_starts=starts[:, :stop]))
        assert_equal_in_float64(torch.cat(outputs, dim=1), alone[0])


@pytest.mark.parametrize(
    ("encoding", "processor"),
    [*product(("rotary", "learned", "fire", "kerple_log"), ["cdape"]), ("rotary", "mta"), ("alibi", "selective")],
)
@pytest.mark.parametrize("place", [{"randomized_positions": LENGTH + 20}, {"attention_window": 4}, CONTINUOUS])
@torch.inference_mode()
def test_documents_at_randomized_positions_and_in_a_window(
    encoding: str, processor: str, place: dict[str, int]
) -> None:
    """Positions are randomized within each document's own length."""
    if place is CONTINUOUS and encoding == "learned":
        with pytest.raises(UserError, match="continuous_positions: true, but pos_emb learned supports only integers"):
            small_gpt(LENGTH, encoding, processor, **place)
        return
    gpt = small_gpt(LENGTH, encoding, processor, **place).double()
    tokens = torch.randint(VOCABULARY, (len(PACKED), LENGTH))
    starts = first_keys_of(PACKED).long()
    assert_equal_in_float64(gpt(tokens, document_starts=starts), read_alone(gpt, tokens, PACKED))
    if "randomized_positions" in place:
        cache = gpt.create_kv_cache(LENGTH)
        with pytest.raises(UserError, match="randomized_positions: a cache cannot decode several documents in a row"):
            gpt(tokens[:, :5], kv_cache=cache, document_starts=starts[:, :5])
        gpt(tokens[:, :2], kv_cache=cache, document_starts=starts[:, :2])  # one document so far


END = 0
"""End-of-document token, here also the padding token."""


@pytest.mark.parametrize(
    ("encoding", "processor"),
    [("rotary", "none"), ("fire", "cdape"), ("kerple_log", "cdape"), ("cope", "mta"), ("rotary", "selective")],
)
@torch.inference_mode()
def test_documents_are_found_in_the_tokens(encoding: str, processor: str) -> None:
    """A model trained with document masking finds documents in left-padded rows and in chunked input."""
    gpt = small_gpt(LENGTH, encoding, processor).double()
    tokens = torch.randint(1, VOCABULARY, (len(PACKED), LENGTH))
    for b, row in enumerate(PACKED):
        for start, length in row:
            tokens[b, start + length - 1] = END
    starts = first_keys_of(PACKED).long()
    assert torch.equal(find_document_starts(tokens, END), starts)
    together, alone = gpt(tokens), read_alone(gpt, tokens, PACKED)
    gpt.end_of_document = END
    assert_equal_in_float64(gpt(tokens), alone)
    padding = torch.tensor([0, 2, 5])
    padded = torch.stack(
        [torch.cat([row.new_zeros(n), row[: LENGTH - n]]) for n, row in zip(padding, tokens, strict=True)]
    )
    mask = torch.arange(LENGTH) >= padding[:, None]
    whole, cache, pieces = gpt(padded, attention_mask=mask), gpt.create_kv_cache(LENGTH), []
    for start, stop in ((0, 7), (7, 8), (8, LENGTH)):
        pieces.append(gpt(padded[:, start:stop], attention_mask=mask[:, :stop], kv_cache=cache))
    for logits in (whole, torch.cat(pieces, dim=1)):
        for number, n in enumerate(padding.tolist()):
            assert_equal_in_float64(logits[number, n:], alone[number, : LENGTH - n])
    with pytest.raises(RuntimeError, match="padded on the left"):
        gpt(tokens, attention_mask=(torch.arange(LENGTH) != 4).expand(len(tokens), -1))
    gpt.end_of_document = None
    assert torch.equal(gpt(tokens), together)
    assert (together - alone).abs().max() > 0.01


@torch.inference_mode()
def test_one_document_a_row_is_the_plain_forward_pass() -> None:
    """One document per row equals the plain forward pass bit for bit, with the same segments; nothing is masked or
    rotated twice.
    """
    gpt, tokens = small_gpt(LENGTH, "rotary", "none"), torch.randint(VOCABULARY, (2, LENGTH))
    seen: list[AttentionContext] = []
    run_layers = gpt._run_layers
    gpt._run_layers = lambda hidden, context: (seen.append(context), run_layers(hidden, context))[1]
    one_each = torch.zeros(2, LENGTH, dtype=torch.int64)
    assert torch.equal(gpt(tokens, document_starts=one_each), gpt(tokens))
    assert [(c.restarted, [s.document_starts for s in c.segments]) for c in seen] == 2 * [(None, [None])]


def test_a_layout_that_contradicts_itself_is_rejected() -> None:
    gpt, tokens = small_gpt(LENGTH, "none", "none"), torch.zeros(1, 4, dtype=torch.int64)
    for starts in ([[0, 0, 1, 1]], [[1, 1, 2, 2]], [[0, 1, 0, 3]], [[0, 1, 1]]):
        with pytest.raises(ValueError, match="document_starts"):
            gpt(tokens, document_starts=torch.tensor(starts))
    learned, long = small_gpt(LENGTH, "learned", "none"), torch.zeros(1, 46, dtype=torch.int64)
    with pytest.raises(UserError, match="a document has 45 tokens"):
        learned(long, document_starts=torch.tensor([[0, *[1] * 45]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "window"), [(0, None), (0, 5), (7, None)])
def test_masks_that_layers_share_are_their_own(start: int, window: int | None, dtype: torch.dtype) -> None:
    """Masks shared by layers are bit-for-bit those built separately, also for the last rows alone and in several
    blocks.
    """
    encoding, _ = build("rotary", "none")
    rows = pack([[3, 8, 1, 6, 4], [22]])
    starts = first_keys_of(rows)
    q, k, v = (x.to(dtype).requires_grad_() for x in random_qkv(22))
    query, key, backend = TokenRange(start, 22 - start), TokenRange(0, 22), SdpaBackend()
    document_starts = starts[:, start:]
    mask = backend.compute_document_mask(query, key, document_starts, starts.long(), encoding, window, q, dropout=False)
    assert [tuple(block.shape) for block in mask] == [(2, 1, 22 - start, 22)]
    found = []
    for document_mask in (None, mask):
        options = {"document_starts": document_starts, "window": window, "document_mask": document_mask}
        output = backend(AttentionInputs(q[:, :, start:], k, v, query, key, encoding, **options))
        found.append([output, *torch.autograd.grad(output.float().square().sum(), (q, k, v))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_flash_attention_gets_document_bounds(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of FlashAttention follow PyTorch's documentation of `varlen_attn`.

    The test emulates it in plain PyTorch: concatenated sequences, and the number of keys visible to the left of each
    row.
    """
    calls = []

    def attend(q, k, v, starts, key_starts, longest, longest_keys, *, window_size):
        assert starts.dtype == torch.int32
        assert torch.equal(starts, key_starts)
        lengths = starts.diff().tolist()
        assert longest == longest_keys == max(lengths)
        assert (starts[0], starts[-1], min(lengths) > 0) == (0, len(q), True)
        calls.append(window_size)
        left, right = window_size
        assert right == 0
        outputs = []
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            q_own, k_own, v_own = (x.transpose(0, 1) for x in parts)
            distance = torch.arange(q_own.shape[1])[:, None] - torch.arange(q_own.shape[1])
            seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            scores = (q_own @ k_own.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
            outputs.append((scores.softmax(-1) @ v_own).transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    encoding, _ = build("rotary", "none")
    rows = pack([[3, 8, 1, 6, 4], [22], [1, 21]])
    starts, span = first_keys_of(rows), TokenRange(0, 22)
    qkv = [x.requires_grad_() for x in random_qkv(22, batch=3, dtype=torch.float64)]
    documents = pack_documents(starts.long(), torch.device("cpu"))
    options = {"document_starts": starts, "window": window}
    found = []
    for backend, document_mask in ((EagerBackend(), None), (SdpaBackend(), documents)):
        output = backend(AttentionInputs(*qkv, span, span, encoding, document_mask=document_mask, **options))
        found.append([output, *torch.autograd.grad(output.square().sum(), qkv)])
    for expected, own in zip(*found, strict=True):
        assert_equal_in_float64(own, expected)
    assert calls == [(-1, 0) if window in (None, 40) else (window - 1, 0)]


@pytest.mark.parametrize("layers_recomputed", [0, 1])
def test_the_document_mask_is_built_once_for_all_layers(
    layers_recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document mask is built once for all layers, including recomputation.

    The last rows of the top layer have their own mask if only they are requested.
    """
    gpt = small_gpt(LENGTH, "rotary", "none").train()
    gpt.checkpoint_layers = layers_recomputed
    for layer in gpt.local_layers:
        assert isinstance(layer.self_attention.core_attention.backend, SdpaBackend)
    built: list[AttentionInputs] = []
    real = pytorch.compute_visible_mask
    monkeypatch.setattr(pytorch, "compute_visible_mask", lambda inputs: (built.append(inputs), real(inputs))[1])
    tokens, starts = torch.randint(VOCABULARY, (len(PACKED), LENGTH)), first_keys_of(PACKED).long()
    gpt(tokens, document_starts=starts).sum().backward()
    assert (len(gpt.local_layers), len(built)) == (2, 1)
    gpt(tokens, num_logits=3, document_starts=starts)
    assert len(built) == 3


@pytest.mark.parametrize("pattern", [["rotary", "pope"], ["pope", "rotary"]])
def test_layers_whose_rotated_queries_differ_in_length_have_their_own_masks(
    pattern: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention limits the length of rotated queries, which PoPE doubles."""
    gpt = small_gpt(LENGTH, pattern, "none")
    tokens, starts = torch.randint(VOCABULARY, (len(PACKED), LENGTH)), first_keys_of(PACKED).long()
    expected, calls = gpt(tokens, document_starts=starts), []

    def attend(inputs: AttentionInputs, documents: PackedDocuments) -> Tensor:
        calls.append(inputs.encoding.qk_head_dim)
        return EagerBackend()(inputs)

    monkeypatch.setattr(pytorch, "attend_packed", attend)
    monkeypatch.setattr(pytorch, "has_packed_attention", lambda like, head_dim: head_dim <= 8)
    torch.testing.assert_close(gpt(tokens, document_starts=starts), expected, rtol=1e-4, atol=1e-5)
    assert calls == [8]
