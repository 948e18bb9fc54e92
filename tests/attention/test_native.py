"""C implementation of score processors as a backend: equal to eager, and its fallbacks to row blocks."""

import logging
from dataclasses import replace

import pytest
import torch
from position_methods import build, random_qkv

from megatron.attention.backends import fused_processor
from megatron.attention.backends.backend import AttentionFormula, supports_document_starts
from megatron.attention.backends.fused_processor import NativeBackend
from megatron.attention.backends.pytorch import EagerBackend
from megatron.attention.backends.registry import RowBlockBackend, select_backend
from megatron.attention.inputs import AttentionInputs
from megatron.kernels.cdape_attention import cpu
from megatron.position.registry import build_processor
from megatron.position.token_range import TokenRange, sample_positions
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding

compiled = pytest.mark.skipif(cpu.describe_unavailable() is not None, reason=str(cpu.describe_unavailable()))


class Refused:
    """Fallback that must not be called."""

    def __call__(self, rows: AttentionInputs) -> torch.Tensor:
        raise AssertionError("fell back to row blocks")


def rows_of(pair: tuple[str, str], length: int = 21, start: int = 0, **keys) -> AttentionInputs:
    encoding, processor = build(*pair)
    q, k, v = (x.requires_grad_() for x in random_qkv(length))
    return AttentionInputs(
        q[:, :, start:],
        k,
        v,
        TokenRange(start, length - start),
        TokenRange(0, length),
        encoding,
        processor,
        **keys,
    )


def differentiated(backend, rows: AttentionInputs) -> list[torch.Tensor]:
    out = backend(rows)
    parameters = [x for module in (rows.encoding, rows.processor) for x in module.parameters()]
    into = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = torch.autograd.grad(out, [rows.q, rows.k, rows.v, *parameters], into, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if x is None else x for x in grads)]


@compiled
@pytest.mark.parametrize("pair", [(e, p) for e in ("none", "kerple_log") for p in ("dape", "cdape")])
@pytest.mark.parametrize("keys", [{}, {"start": 9}, {"window": 6}], ids=str)
def test_document_masking_matches_eager(pair: tuple[str, str], keys: dict[str, int]) -> None:
    """Documents are separated as in eager, which tests/attention/test_documents.py checks."""
    rows = rows_of(pair, length=40, **keys)
    begins = torch.tensor([[0] * 7 + [7] * 14 + [21] * 2 + [23] * 17, [0] * 39 + [39]], dtype=torch.int32)
    rows = replace(rows, document_starts=begins[:, keys.get("start", 0) :])
    backend = NativeBackend(Refused(), is_requested=True)
    assert supports_document_starts(backend)
    for ours, reference in zip(differentiated(backend, rows), differentiated(EagerBackend(), rows), strict=True):
        assert_close_in_rounding(ours, reference, terms=2 * 4 * 40 * 40, sums=8)


@compiled
@pytest.mark.parametrize("pair", [(e, p) for e in ("none", "alibi", "kerple_log", "t5") for p in ("dape", "cdape")])
@pytest.mark.parametrize("keys", [{}, {"start": 9}, {"window": 6}, {"start": 20, "window": 5}], ids=str)
def test_equals_eager(pair: tuple[str, str], keys: dict[str, int]) -> None:
    rows = rows_of(pair, **keys)
    for ours, reference in zip(
        differentiated(NativeBackend(Refused(), is_requested=True), rows),
        differentiated(EagerBackend(), rows),
        strict=True,
    ):
        # Sums over a map of all heads, rows and columns through two convolutions, in both passes.
        assert_close_in_rounding(ours, reference, terms=2 * 4 * 21 * 21, sums=8)


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (("kerple_log", "none"), "it needs a score processor"),
        (("fire", "cdape"), "it cannot compute a bias that is not a function of the distance"),
        (("cope", "cdape"), "it cannot compute a bias|it cannot add contextual terms"),
        (("kerple_log", "cdape"), "no C compiler"),
    ],
)
def test_rejected_calls_are_named(pair: tuple[str, str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "describe_unavailable", lambda: "no C compiler was found")
    with pytest.raises(UserError, match=f"attention_backend 'native': ({why}).*; choose from auto, "):
        select_backend("native", 4, AttentionFormula(*build(*pair)))


def test_too_long_inputs_are_rejected_and_auto_uses_row_blocks() -> None:
    encoding, _ = build("kerple_log", "cdape")
    wide = build_processor("cdape", encoding.dims, {"kernel_size": 17}, has_bias=True)
    with pytest.raises(UserError, match="its kernels have a size of at most 15, not 17; choose from auto, eager"):
        select_backend("native", 4, AttentionFormula(encoding, wide))
    assert isinstance(select_backend("auto", 4, AttentionFormula(encoding, wide)), RowBlockBackend)


@compiled
def test_fallback_to_row_blocks_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    fused_processor.warn_fallback.cache_clear()
    rows = rows_of(("kerple_log", "cdape"))
    drawn = sample_positions(21, 40, seed=0)
    halves = {name: getattr(rows, name).bfloat16() for name in "qkv"}
    left_out = {
        "padding": replace(rows, key_mask=torch.ones(2, 21, dtype=torch.bool)),
        "attention_dropout with a score processor": replace(rows, dropout=1e-9),
        "a score processor whose heads are divided among ranks": replace(rows, v=rows.v[:, :2], heads=slice(0, 2)),
        "a cache that has dropped keys": replace(
            rows,
            q=rows.q[:, :, 13:],
            k=rows.k[:, :, 8:],
            v=rows.v[:, :, 8:],
            query=TokenRange(13, 8),
            key=TokenRange(8, 13),
            window=5,
        ),
        "randomized positions": replace(rows, query=TokenRange(0, 21, drawn), key=TokenRange(0, 21, drawn)),
        "torch.bfloat16": replace(rows, **halves),
    }
    backend = select_backend("native", 4, AttentionFormula(rows.encoding, rows.processor))
    with caplog.at_level(logging.WARNING):
        for each in [*left_out.values(), *left_out.values()]:
            torch.manual_seed(0)
            out = backend(each)
            torch.manual_seed(0)
            assert torch.equal(out, RowBlockBackend(4)(each))
    output = [record.message for record in caplog.records]
    assert output == [f"attention_backend native: falling back to PyTorch's row blocks for {why}" for why in left_out]


@compiled
def test_auto_uses_it_if_supported_and_row_blocks_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(("kerple_log", "cdape"))
    auto = select_backend("auto", 4, AttentionFormula(rows.encoding, rows.processor))
    assert torch.equal(auto(rows), select_backend("native", 4, AttentionFormula(rows.encoding, rows.processor))(rows))
    assert isinstance(select_backend("auto", 4, AttentionFormula(*build("fire", "cdape"))), RowBlockBackend)
    masked = replace(rows, key_mask=torch.ones(2, 21, dtype=torch.bool))
    caplog.clear()
    assert torch.equal(auto(masked), RowBlockBackend(4)(masked))
    assert not caplog.records


def test_auto_works_without_a_compiler_and_reports_the_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused_processor._warn_unavailable.cache_clear()
    monkeypatch.setattr(cpu, "describe_unavailable", lambda: "no C compiler was found (cc, gcc, clang)")
    rows = rows_of(("kerple_log", "cdape"))
    auto = select_backend("auto", 4, AttentionFormula(rows.encoding, rows.processor))
    for _ in range(2):
        assert torch.equal(auto(rows), RowBlockBackend(4)(rows))
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "score processors run several times slower on this CPU without their C code: "
        "no C compiler was found (cc, gcc, clang)"
    ]
    fused_processor._warn_unavailable.cache_clear()
