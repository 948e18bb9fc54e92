"""FlexAttention as a backend: its blocks, its results in PyTorch's uncompiled implementation, and unsupported calls."""

from dataclasses import replace

import pytest
import torch
from position_methods import build, inputs_of, random_qkv
from torch.nn.attention import flex_attention as torch_flex

from megatron.attention.backends import flex
from megatron.attention.backends.backend import AttentionFormula
from megatron.attention.backends.flex import MAX_SHAPES, FlexBackend, build_block_mask, build_document_mask
from megatron.attention.backends.pytorch import EagerBackend, RowBlockBackend
from megatron.attention.inputs import AttentionInputs
from megatron.position.token_range import TokenRange, build_causal_mask, sample_positions
from megatron.utils.errors import UserError
from tools.tolerances import assert_within_rounding

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "columns", "offset", "window"),
    [
        (300, 300, 0, None),
        (256, 256, 0, 128),
        (130, 400, 270, None),
        (256, 512, 256, 200),
        (5, 5, 0, 2),
        (1, 257, 256, 3),
    ],
)
def test_blocks_match_the_whole_map(rows: int, columns: int, offset: int, window: int | None) -> None:
    """Blocks equal those of the whole mask, also with documents, which differ between sequences."""
    mask = build_block_mask(rows, columns, offset, window, CPU)
    visible = build_causal_mask(TokenRange(offset, rows), TokenRange(0, columns), CPU, window)
    assert_blocks(mask, 0, visible)
    column, row = torch.arange(columns), offset + torch.arange(rows)
    starts = torch.stack([torch.where(row < cut, 0, cut) for cut in (1, 129, 256, 300)]).int()
    documents = build_document_mask(rows, columns, offset, window, starts)
    for sequence, first_columns in enumerate(starts):
        assert_blocks(documents, sequence, visible & (column >= first_columns[:, None]))


def assert_blocks(mask: torch_flex.BlockMask, sequence: int, visible: torch.Tensor) -> None:
    (rows, columns), size = visible.shape, flex.BLOCK_SIZE
    for row in range(-(-rows // size)):
        found = {}
        for name in ("kv", "full_kv"):
            count = int(getattr(mask, f"{name}_num_blocks")[sequence, 0, row])
            found[name] = set(getattr(mask, f"{name}_indices")[sequence, 0, row, :count].tolist())
        for column in range(-(-columns // size)):
            block = visible[row * size : (row + 1) * size, column * size : (column + 1) * size]
            is_full = block.numel() == size * size and bool(block.all())
            assert (column in found["full_kv"]) == is_full
            assert (column in found["kv"]) == (bool(block.any()) and not is_full)


def results(
    backend,
    method,
    qkv,
    query: TokenRange,
    window: int | None,
    heads: slice,
    cap: float | None,
    document_starts=None,
    document_mask=None,
) -> dict[str, torch.Tensor]:
    encoding, processor = method
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    key = TokenRange(0, query.stop)
    options = {
        "window": window,
        "heads": heads,
        "softcap": cap,
        "document_starts": document_starts,
        "document_mask": document_mask,
    }
    out = backend(inputs_of(*leaves, query, key, encoding, processor, **options))
    named = dict(encoding.named_parameters())
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).cos().view(out.shape).to(out)
    found = torch.autograd.grad(out, [*leaves, *named.values()], upstream)
    return {"output": out.detach(), **dict(zip(["q", "k", "v", *named], found, strict=True))}


@pytest.mark.parametrize(
    ("name", "start", "window", "heads", "cap", "documents"),
    [
        ("kerple_log", 0, None, slice(None), None, False),
        ("t5", 7, None, slice(None), None, False),
        ("alibi", 0, 5, slice(1, 3), None, False),
        ("kerple_log", 0, None, slice(None), 0.7, False),
        ("none", 7, 9, slice(None), 0.7, False),
        ("kerple_log", 0, None, slice(None), None, True),
        ("t5", 7, 5, slice(1, 3), 0.7, True),
        ("fox", 7, None, slice(None), 0.7, True),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_equals_eager_in_the_output_and_all_gradients(
    name, start, window, heads, cap, documents, monkeypatch
) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # PyTorch does not support gradients on a CPU
    encoding, _ = build(name, "none")
    q, k, v = (x[:, heads] for x in random_qkv(20))
    query = TokenRange(start, 20 - start)
    qkv = (q[:, :, start:], k, v)
    begins = torch.tensor([[0] * 3 + [3] * 9 + [12] * 8, [0] * 8 + [8] * 12], dtype=torch.int32)[:, start:]
    rest = (query, window, heads, cap, begins if documents else None)
    found = results(FlexBackend(EagerBackend()), (encoding, None), qkv, *rest)
    exact = (build(name, "none")[0], None)
    exact[0].load_state_dict(encoding.state_dict())
    exact[0].double()
    doubled = [x.double() for x in qkv]
    assert_within_rounding(found, lambda: results(EagerBackend(), exact, doubled, *rest), torch.float32)
    if documents:  # bit-for-bit equal with precomputed masks
        starts = torch.cat([begins.new_zeros(2, start), begins], 1).long()
        places = (query, TokenRange(0, 20), begins, starts, encoding, window, q)
        mask = FlexBackend(EagerBackend()).compute_document_mask(*places, dropout=False)
        again = results(FlexBackend(EagerBackend()), (encoding, None), qkv, *rest, document_mask=mask)
        assert all(torch.equal(found[name], again[name]) for name in found)
        with torch.no_grad():  # a shape not used in training
            assert FlexBackend(EagerBackend()).compute_document_mask(*places, dropout=False) is None


@pytest.mark.parametrize(
    ("pair", "complaint"),
    [
        (("kerple_log", "cdape"), "it cannot process scores"),
        (("none", "none"), "it needs a bias, a soft cap or a sink"),
        (("fire", "none"), "it cannot compute a bias that is not a function of the distance"),
        (("kerple_bias_weight", "none"), "it cannot multiply the scores"),
        (("cope", "none"), "it cannot add contextual terms"),
        (("alibi", "none"), None),
    ],
)
def test_it_rejects_biases_other_than_of_the_distance(pair, complaint, monkeypatch) -> None:
    backend = FlexBackend(EagerBackend())
    if not torch.cuda.is_available():
        assert backend.describe_unsupported(AttentionFormula(*build(*pair))) == "it needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.describe_unsupported(AttentionFormula(*build(*pair))) == complaint
    able = complaint is None or pair == ("none", "none")
    assert (backend.describe_unsupported(AttentionFormula(*build(*pair), softcap=50.0)) is None) == able


def test_it_is_not_used_for_deterministic_runs(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "not deterministic (deterministic: true)" in (
        FlexBackend(EagerBackend()).describe_unsupported(AttentionFormula(*build("alibi", "none"))) or ""
    )


def test_it_is_rejected_by_name_without_a_gpu() -> None:
    from megatron.attention.backends.registry import select_backend

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="attention_backend 'flex': it needs a CUDA device; choose from auto, "):
        select_backend("flex", 4, AttentionFormula(*build("alibi", "none")))


def test_unsupported_calls_use_row_blocks_and_are_reported_once(monkeypatch, caplog) -> None:
    flexed: list[int] = []

    def attend(inputs: AttentionInputs) -> torch.Tensor:
        flexed.append(inputs.query.length)
        return EagerBackend()(inputs)

    monkeypatch.setattr(flex, "attend_with_flex", attend)
    flex.warn_fallback.cache_clear()
    encoding, _ = build("alibi", "none")
    backend, row_blocks = FlexBackend(RowBlockBackend(4)), RowBlockBackend(4)

    def inputs(length: int) -> AttentionInputs:
        torch.manual_seed(length)
        return AttentionInputs(*random_qkv(length), TokenRange(0, length), TokenRange(0, length), encoding)

    drawn = TokenRange(0, 9, sample_positions(9, 20, seed=3))
    for rows in (
        replace(inputs(9), key_mask=torch.ones(2, 9, dtype=torch.bool)),
        replace(inputs(9), query=drawn, key=drawn),
        replace(inputs(9), key_mask=torch.ones(2, 9, dtype=torch.bool)),
    ):
        assert torch.equal(backend(rows), row_blocks(rows))
    with torch.no_grad():
        backend(inputs(9))  # not trained yet
    assert flexed == []
    lengths = list(range(9, 9 + MAX_SHAPES + 1))
    for length in lengths:
        backend(inputs(length))
    assert flexed == lengths[:-1]
    with torch.no_grad():
        backend(inputs(9))
    assert flexed == [*lengths[:-1], 9]
    assert [record.message for record in caplog.records] == [
        f"attention_backend flex: falling back to PyTorch's row blocks for {why}"
        for why in ("padding", "randomized positions", f"more than {MAX_SHAPES} shapes")
    ]
