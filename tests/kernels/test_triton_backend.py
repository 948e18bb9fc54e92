"""Kernels as an attention backend: equal to eager or rejected, for every method and processor of the registry."""

import gc
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from memory_measurement import Peak
from models import build_model
from position_methods import MAPPED, build, inputs_of, random_qkv
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends import triton
from megatron.attention.backends.backend import AttentionBackend, AttentionFormula, supports_document_starts
from megatron.attention.backends.pytorch import EagerBackend
from megatron.attention.backends.registry import RowBlockBackend, select_backend
from megatron.attention.backends.triton import KernelChoice, TritonBackend, select_kernel
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_table
from megatron.kernels.bias.fire import MAX_WIDTH
from megatron.kernels.cdape_attention.op import MAX_PROCESSOR_WIDTH
from megatron.kernels.head_dim import MAX_HEAD_DIM
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.base import FireParameters
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims
from megatron.position.processor import Processor
from megatron.position.registry import (
    build_encoding,
    build_processor,
    list_encodings,
    list_processors,
    load_encoding_class,
    load_processor_class,
)
from megatron.position.token_range import TokenRange, sample_positions
from megatron.utils.errors import UserError
from tools.tolerances import assert_within_rounding

SHAPE = AttentionDims(num_heads=3, head_dim=16, hidden_size=48, train_length=16, max_length=16)
SUPPORTED = [
    pair
    for pair in MAPPED
    if TritonBackend(EagerBackend()).describe_unsupported(AttentionFormula(*build(*pair, SHAPE))) is None
]
ABLE = [
    (encoding, processor)
    for encoding, processor in SUPPORTED
    if processor == "none" or not load_encoding_class(encoding).overrides_hook("gate")
]
"""Without processors on gates, which have CUDA kernels alone (`cdape_attention/test_gated_op.py`)."""
SINKS = torch.tensor([0.5, 1.0, 2.0])
GATE_SUMS = torch.zeros(2, 3, 9)
# float32 sums of a few hundred terms of order one, including exponentials
TOLERANCE = 3e-5


class Unused:
    """Fallback that fails if called, except for a processor on FIRE's bias."""

    def __call__(self, rows: AttentionInputs) -> torch.Tensor:
        assert rows.processor is not None
        assert rows.dense is not None
        return RowBlockBackend(8)(rows)


Built = tuple[Encoding, Processor | None]


def on(device: str, encoding: str, processor: str) -> Built:
    e, p = build_encoding(encoding, SHAPE, options_of(encoding)), build(encoding, processor, SHAPE)[1]
    return e.to(device), p if p is None else p.to(device)


def options_of(encoding: str) -> dict[str, int]:
    """Return options of a narrow FIRE network, because its kernels loop over the network, which is slow in the
    interpreter.
    """
    return {"width": 5} if encoding == "fire" else {}


def random_on(device: str, length: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(device) for x in random_qkv(length, SHAPE, batch=batch))


def results(
    backend: AttentionBackend,
    built: Built,
    qkv,
    query: TokenRange,
    key: TokenRange,
    window: int | None,
    document_starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the output and all gradients."""
    encoding, processor = built
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    own = None if sinks is None else sinks.clone().requires_grad_()
    options = {"window": window, "document_starts": document_starts, "sinks": own}
    out = backend(inputs_of(*inputs, query, key, encoding, processor, **options))
    modules = {"encoding": encoding} if processor is None else {"encoding": encoding, "processor": processor}
    named = {f"{part}.{name}": x for part, module in modules.items() for name, x in module.named_parameters()}
    named |= {} if own is None else {"sinks": own}
    leaves = [*inputs, *named.values()]
    into = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).cos().view(out.shape).to(out)
    grads = torch.autograd.grad(out, leaves, into, allow_unused=True, materialize_grads=True)
    return {"output": out.detach(), **dict(zip(["q", "k", "v", *named], grads, strict=True))}


def test_kernels_support_every_toeplitz_bias_and_fire() -> None:
    expected = [
        (encoding, processor)
        for encoding, processor in MAPPED
        if (not load_encoding_class(encoding).overrides_hook("dense") or encoding == "fire")
        and not load_encoding_class(encoding).overrides_hook("contextual")
        and (processor == "none" or not build(encoding, "none", SHAPE)[0].multiplies_scores)
        and processor in ("none", "cdape", "dape", "talking_heads")
    ]
    assert expected == SUPPORTED
    assert len(ABLE) > 40


# Every encoding alone and with one processor, whose kernels read only the encoding's table. The two encodings passed
# differently meet every processor, also at other positions and in windows.
TURNS = dict(zip(list_encodings(), cycle(list_processors()), strict=False))
CASES = [(e, p, 4, None) for e, p in ABLE if p in ("none", TURNS[e]) or e in ("none", "fire")] + [
    (encoding, processor, start, window)
    for encoding in ("kerple_log", "fire")
    for processor in ("none", "dape", "cdape", "talking_heads")
    # A map after the softmax has no kernels for few rows.
    for start, window in ((5 if processor == "talking_heads" else 12, None), (0, 5), (5, 3))
]


@pytest.fixture(autouse=True)
def _few_programs(tall_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "ROWS_PER_CALL", 8)


@pytest.mark.parametrize(("encoding", "processor", "start", "window"), CASES)
def test_it_equals_eager_in_outputs_and_all_gradients(
    encoding: str, processor: str, start: int, window: int | None, device: str
) -> None:
    built, q, k, v = on(device, encoding, processor), *random_on(device, 13, batch=1)
    query, key = TokenRange(start, 13 - start), TokenRange(0, 13)
    found = results(TritonBackend(Unused()), built, (q[:, :, start:], k, v), query, key, window)
    exact = [None if module is None else module.cpu().double() for module in built]
    qkv = [x.cpu().double() for x in (q[:, :, start:], k, v)]
    assert_within_rounding(found, lambda: results(EagerBackend(), exact, qkv, query, key, window), torch.float32)


@pytest.mark.parametrize(
    ("encoding", "processor", "start", "window"),
    [
        ("none", "none", 0, None),
        ("kerple_log", "none", 5, None),
        ("kerple_log", "none", 0, 4),
        ("kerple_bias_weight", "none", 0, None),
        ("kerple_log", "cdape", 5, None),
        ("alibi", "cdape", 0, 4),
        ("none", "dape", 0, None),
        ("kerple_log", "talking_heads", 5, 9),
    ],
)
def test_documents_of_a_row_are_masked(
    encoding: str, processor: str, start: int, window: int | None, device: str
) -> None:
    """Documents of a row are separated as in eager, which tests/attention/test_documents.py checks."""
    assert supports_document_starts(TritonBackend(Unused()))
    built, q, k, v = on(device, encoding, processor), *random_on(device, 40, batch=2)
    query, key, q = TokenRange(start, 40 - start), TokenRange(0, 40), q[:, :, start:]
    begins = torch.tensor([[0] * 7 + [7] * 15 + [22] + [23] * 17, [0] * 16 + [16] * 24], dtype=torch.int32)[:, start:]
    found = results(TritonBackend(Unused()), built, (q, k, v), query, key, window, begins.to(device))
    exact = [None if module is None else module.cpu().double() for module in built]
    qkv = [x.cpu().double() for x in (q, k, v)]
    assert_within_rounding(
        found, lambda: results(EagerBackend(), exact, qkv, query, key, window, begins), torch.float32
    )


@pytest.mark.parametrize(
    ("encoding", "processor", "window"),
    [
        ("none", "none", None),
        ("kerple_log", "none", 5),
        ("kerple_log", "cdape", None),
        ("none", "dape", 4),
        ("kerple_log", "talking_heads", 5),
    ],
)
def test_sinks_are_in_the_kernels(encoding: str, processor: str, window: int | None, device: str) -> None:
    """Kernels compute sinks, their gradient, and the gradient of a processor's last bias, which a plain softmax
    cancels.
    """
    built, qkv = on(device, encoding, processor), random_on(device, 13, batch=1)
    span = TokenRange(0, 13)
    found = results(TritonBackend(Unused()), built, qkv, span, span, window, sinks=SINKS.to(device))
    exact = [None if module is None else module.cpu().double() for module in built]
    doubled = [x.cpu().double() for x in qkv]
    assert_within_rounding(
        found,
        lambda: results(EagerBackend(), exact, doubled, span, span, window, sinks=SINKS.double()),
        torch.float32,
    )


def test_a_bias_that_the_processor_alone_sees(device: str) -> None:
    e, _ = on(device, "kerple_log", "none")
    p = build_processor("cdape", SHAPE, {"residual_bias": False}, has_bias=True).to(device)
    rows = AttentionInputs(*random_on(device, 9, batch=1), TokenRange(0, 9), TokenRange(0, 9), e, p)
    torch.testing.assert_close(TritonBackend(Unused())(rows), EagerBackend()(rows), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("encoding", "processor", "change", "route"),
    [
        ("none", "none", {}, KernelChoice.FUSED_BIAS),
        ("kerple_log", "none", {}, KernelChoice.FUSED_BIAS),
        ("kerple_bias_weight", "none", {}, KernelChoice.FUSED_BIAS),
        ("kerple_log", "none", {"dropout": 0.1}, KernelChoice.MATRIX),
        ("kerple_bias_weight", "none", {"dropout": 0.1}, KernelChoice.PYTORCH),
        ("none", "none", {"dropout": 0.1}, KernelChoice.PYTORCH),
        ("fire", "none", {}, KernelChoice.MATRIX),
        ("fire", "none", {"dropout": 0.1}, KernelChoice.MATRIX),
        ("fire", "cdape", {}, KernelChoice.PROCESSED_MATRIX),
        ("kerple_log", "cdape", {}, KernelChoice.FUSED_PROCESSOR),
        ("none", "dape", {}, KernelChoice.FUSED_PROCESSOR),
        ("kerple_log", "talking_heads", {}, KernelChoice.FUSED_PROCESSOR),
        ("fox", "cdape", {"row_bias": GATE_SUMS, "key_bias": -GATE_SUMS}, KernelChoice.PYTORCH),  # float32
        ("kerple_log", "cdape", {"dropout": 0.1}, KernelChoice.PYTORCH),
        ("none", "none", {"sinks": SINKS}, KernelChoice.FUSED_BIAS),
        ("fire", "none", {"sinks": SINKS}, KernelChoice.PROCESSED_MATRIX),
        ("kerple_log", "none", {"sinks": SINKS, "dropout": 0.1}, KernelChoice.PYTORCH),
        ("kerple_log", "none", {"sinks": SINKS, "key_bias": torch.zeros(2, 3, 9)}, KernelChoice.PYTORCH),
    ],
)
def test_the_route_of_a_call(encoding: str, processor: str, change: dict, route: KernelChoice, device: str) -> None:
    e, p = on(device, encoding, processor)
    span = TokenRange(0, 9)
    rows = AttentionInputs(*random_on(device, 9), span, span, e, p, **change)
    found = select_kernel(rows, compute_table(e, span, span, device) or ScoreTerms())
    assert found.choice is route
    assert bool(found.reason) == (route is KernelChoice.PYTORCH)


@pytest.mark.parametrize(("encoding", "processor"), [("kerple_log", "none"), ("kerple_log", "cdape"), ("fire", "none")])
def test_more_heads_than_a_grid_has_programs_are_left_to_row_blocks(encoding: str, processor: str, device: str) -> None:
    """An evaluation computes thousands of short sequences at a time."""
    e, p = on(device, encoding, processor)
    span = TokenRange(0, 9)
    table = compute_table(e, span, span, device) or ScoreTerms()
    for batch, is_left in ((21845, False), (21846, True)):
        q, k, v = (x[:1].expand(batch, -1, -1, -1) for x in random_on(device, 9))
        found = select_kernel(AttentionInputs(q, k, v, span, span, e, p), table)
        assert (found.choice is KernelChoice.PYTORCH) == is_left
        assert found.reason == ("more than 65,535 heads in all sequences together" if is_left else "")


@pytest.mark.parametrize("processor", ["none", "cdape"])
def test_fallbacks_at_run_time_are_reported_once(processor: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    e, p = on(device, "kerple_log", processor)
    q, k, v = random_on(device, 9)
    span = TokenRange(0, 9)
    backend = TritonBackend(RowBlockBackend(4))
    triton.warn_fallback.cache_clear()
    mask = (torch.arange(9)[None] >= torch.tensor([[0], [3]])).to(device)
    drawn = TokenRange(0, 9, sample_positions(9, 20, seed=3))
    cases = [AttentionInputs(q, k, v, span, span, e, p, key_mask=mask), AttentionInputs(q, k, v, drawn, drawn, e, p)]
    if p is not None:
        cases.append(AttentionInputs(q, k, v[:, :2], span, span, e, p, heads=slice(0, 2)))
    for rows in cases:
        for _ in range(2):
            assert torch.equal(backend(rows), RowBlockBackend(4)(rows))
    output = [record.message for record in caplog.records]
    divided = "a score processor whose heads are divided among ranks"
    expected = ["padding", "randomized positions", *([divided] if p is not None else [])]
    assert output == [f"attention_backend triton: falling back to PyTorch's row blocks for {why}" for why in expected]


@pytest.mark.parametrize(
    ("encoding", "processor", "shape", "complaint"),
    [
        ("cope", "cdape", SHAPE, "contextual terms"),
        ("gaussian_weight1", "cdape", SHAPE, "multiply the scores before a processor"),
        (
            "alibi",
            "none",
            AttentionDims(1, MAX_HEAD_DIM + 2, MAX_HEAD_DIM + 2, 16, 16),
            "head dimension is at most 128, not 130",
        ),
    ],
)
def test_the_rest_is_rejected_by_name(encoding: str, processor: str, shape: AttentionDims, complaint: str) -> None:
    with pytest.raises(UserError, match=f"attention_backend 'triton': .*{complaint}.*choose from auto"):
        select_backend("triton", 4, AttentionFormula(*build(encoding, processor, shape)))


def test_sizes_beyond_the_kernels_are_rejected_by_name() -> None:
    encoding = load_encoding_class("fire")(SHAPE, width=MAX_WIDTH + 1)
    with pytest.raises(UserError, match="'triton': its networks have at most 64 heads and width 64, not 3 and 65"):
        select_backend("triton", 4, AttentionFormula(encoding))
    for name in ("cdape", "dape"):
        encoding, _ = build("kerple_log", "none", SHAPE)
        wide = load_processor_class(name)(SHAPE, has_bias=True, width=MAX_PROCESSOR_WIDTH + 1)
        with pytest.raises(UserError, match="'triton': its processors have a width of at most 64, not 65"):
            select_backend("triton", 4, AttentionFormula(encoding, wide))


def test_a_bias_for_which_there_is_no_kernel_is_rejected() -> None:
    class Other(Encoding):
        def dense(self, query, key, like, heads):
            raise AssertionError("not asked for")

    assert "not a function of the distance" in (
        TritonBackend(Unused()).describe_unsupported(AttentionFormula(Other(SHAPE))) or ""
    )


@pytest.mark.parametrize("encoding", ["kerple_log", "fire"])
def test_dropout_drops_the_same_weights_forward_and_backward(encoding: str, device: str) -> None:
    """Dropout drops the same weights in both passes.

    The output is linear in v: gradient and output use the same mask only if v·(dv of g·out) = g·out.
    """
    e, p = on(device, encoding, "none")
    q, k, v = random_on(device, 11)
    span = TokenRange(0, 11)
    v.requires_grad_()
    kept = TritonBackend(Unused())(AttentionInputs(q, k, v, span, span, e, p, dropout=0.5))
    upstream = torch.randn_like(kept)
    torch.testing.assert_close((torch.autograd.grad(kept, v, upstream)[0] * v).sum(), (kept * upstream).sum())
    whole = TritonBackend(Unused())(AttentionInputs(q, k, v, span, span, e, p))
    assert not torch.allclose(kept, whole)


def test_dropout_keeps_the_mean(device: str) -> None:
    e, p = on(device, "kerple_log", "none")
    rows = AttentionInputs(*random_on(device, 11, batch=1), TokenRange(0, 11), TokenRange(0, 11), e, p)
    q, k, v = (x.expand(100, -1, -1, -1) for x in (rows.q, rows.k, rows.v))
    draws = TritonBackend(Unused())(replace(rows, q=q, k=k, v=v, dropout=0.5)).detach()
    # Within six standard errors of the mean of 100 draws.
    assert ((draws.mean(0) - TritonBackend(Unused())(rows)[0]).abs() <= 6 * draws.std(0) / 10 + 1e-5).all()


def test_dropout_keeps_documents_masked(device: str) -> None:
    """Dropout keeps documents separate. With unit vectors as values, outputs are the weights."""
    e, p = on(device, "kerple_log", "none")
    q, k, _ = random_on(device, 11, batch=1)
    begins = torch.tensor([[0] * 4 + [4] * 7], dtype=torch.int32, device=device)
    v = torch.eye(11, 16, device=device).expand(1, 3, -1, -1)
    rows = AttentionInputs(q, k, v, TokenRange(0, 11), TokenRange(0, 11), e, p, document_starts=begins, dropout=0.1)
    weights = TritonBackend(Unused())(rows)[..., :11]
    outside = torch.ones(11, 11, dtype=torch.bool, device=device).triu(1)
    outside[4:, :4] = True
    assert (weights[..., outside] == 0).all()
    assert (weights[..., ~outside] > 0).sum() > weights[..., ~outside].numel() / 2


def test_without_a_gpu_or_the_interpreter_it_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_triton_available", lambda: False)
    with pytest.raises(UserError, match="attention_backend 'triton': it needs a CUDA device"):
        select_backend("triton", 4, AttentionFormula(*build("alibi", "none", SHAPE)))


@pytest.mark.parametrize(
    ("encoding", "processor", "recompute"),
    [
        ("kerple_log", "none", False),
        ("kerple_log", "cdape", True),
        ("rotary", "cdape", False),
        ("kerple_log", "talking_heads", True),
        ("fire", "none", True),
        ("fire", "cdape", False),
    ],
)
def test_a_model_trains_and_decodes_through_it(encoding: str, processor: str, recompute: bool, device: str) -> None:
    # Two layers share one table, or each has its own of those computed together.
    layers, per_layer = (2, processor == "cdape") if encoding == "kerple_log" else (1, False)
    options = ModelOptions(
        num_layers=layers, hidden_size=48, num_attention_heads=3, seq_length=12, checkpoint_activations=recompute,
        make_vocab_size_divisible_by=8, init_method_std=0.2,
    )  # fmt: skip
    position = PositionOptions(
        pos_emb=encoding, pos_emb_options=options_of(encoding), score_processor=processor, pos_emb_per_layer=per_layer
    )
    x, labels = torch.randint(30, (2, 2, 12)).to(device)
    found = []
    for backend in ("eager", "triton"):
        gpt = build_model(options, position, 30, seed=3, backend=backend, device=device)
        loss = gpt(x, labels).mean()
        loss.backward()
        found.append((gpt, loss, [p.grad for p in gpt.parameters()]))
    (_, reference, exact), (gpt, loss, ours) = found
    torch.testing.assert_close(loss, reference, rtol=TOLERANCE, atol=TOLERANCE)
    largest = max(g.abs().max().item() for g in exact)
    for mine, gradient in zip(ours, exact, strict=True):
        assert (mine - gradient).abs().max() <= TOLERANCE * max(gradient.abs().max().item(), largest / 100)
    gpt.eval()
    with torch.no_grad():
        cache, whole = gpt.create_kv_cache(12), gpt(x)
        parts = torch.cat([gpt(part, kv_cache=cache) for part in x.split([7, 1, 4], dim=1)], dim=1)
    torch.testing.assert_close(parts, whole, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


def test_a_recomputed_layer_frees_the_inputs_of_its_row_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed attention saves only its output, neither q nor k and v."""
    encoding = on(device, "fire", "none")[0]
    parameters = encoding.kernel_parameters()
    assert isinstance(parameters, FireParameters)
    monkeypatch.setattr(triton, "ROWS_PER_CALL", 16)
    x, rows = torch.randn(2, 3, 40, 64, device=device, requires_grad=True), TokenRange(0, 40)

    def attend(x: torch.Tensor) -> torch.Tensor:
        inputs = AttentionInputs(2 * x, 3 * x, 4 * x, rows, rows, encoding)
        return triton.attend_with_bias_matrix(inputs, None, parameters)

    with Peak() as tracked:
        output = checkpoint(attend, x, use_reentrant=False)
    gc.collect()  # PyTorch's frames of nested checkpoints are reference cycles
    assert tracked.now < 1.5 * output.nbytes
    output.sum().backward()
    attend(y := x.detach().requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
