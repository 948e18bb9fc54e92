"""Choice of the backend, and the properties of each backend besides equal results."""

import logging

import pytest
import torch
from memory_measurement import Peak
from position_methods import build, random_qkv

from megatron.attention.backends import pytorch
from megatron.attention.backends.backend import AttentionFormula
from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend, SdpaBackend
from megatron.attention.backends.registry import RowBlockBackend, select_backend
from megatron.attention.inputs import AttentionInputs
from megatron.position.token_range import TokenRange
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding


class Counted:
    """Backend that counts its calls."""

    def __init__(self, backend) -> None:
        self.backend, self.calls = backend, 0

    def __call__(self, rows: AttentionInputs) -> torch.Tensor:
        self.calls += 1
        return self.backend(rows)


@pytest.mark.parametrize(
    ("grad", "length", "processor", "expected"),
    [
        (True, 12, "cdape", "saving_with_processor"),
        (True, 12, "none", "saving_without_processor"),
        (True, 13, "cdape", "recomputed"),
        (True, 13, "none", "recomputed"),
        (False, 5, "cdape", "recomputed"),
        (False, 5, "none", "recomputed"),
    ],
)
def test_row_blocks_keep_the_maps_of_short_training_sequences_alone(
    grad, length, processor, expected, monkeypatch
) -> None:
    monkeypatch.setattr(pytorch, "MAX_KEYS_SAVED", 12)
    encoding, processor = build("kerple_log", processor)
    backend = RowBlockBackend(4)
    counted = {
        name: Counted(getattr(backend, name))
        for name in ("saving_without_processor", "saving_with_processor", "recomputed")
    }
    for name, counter in counted.items():
        setattr(backend, name, counter)
    q, k, v = random_qkv(length)
    with torch.set_grad_enabled(grad):
        out = backend(AttentionInputs(q, k, v, TokenRange(0, length), TokenRange(0, length), encoding, processor))
    assert {name: counter.calls for name, counter in counted.items()} == {**dict.fromkeys(counted, 0), expected: 1}
    reference = EagerBackend()(
        AttentionInputs(q, k, v, TokenRange(0, length), TokenRange(0, length), encoding, processor)
    )
    assert_close_in_rounding(out, reference, terms=32 * 3, sums=4)  # scores, two convolutions, values


def test_auto_uses_sdpa_without_a_bias_and_reports_its_choice(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(select_backend("auto", 4, AttentionFormula(*build("rotary", "none"))), SdpaBackend)
    assert not isinstance(select_backend("auto", 4, AttentionFormula(*build("alibi", "none"))), SdpaBackend)
    assert not isinstance(select_backend("auto", 4, AttentionFormula(*build("rotary", "dape"))), SdpaBackend)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "attention backend: sdpa"
    assert "cannot add a position bias" in lines[1]
    assert "cannot process scores" in lines[2]


@pytest.mark.parametrize("pair", [("t5", "none"), ("none", "cdape")])
def test_sdpa_refuses_by_name(pair: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="attention_backend 'sdpa'"):
        select_backend("sdpa", 4, AttentionFormula(*build(*pair)))


@pytest.mark.parametrize("mask", [False, True])
def test_sdpa_equals_eager_on_rows_after_a_cache_and_with_padding(mask: bool) -> None:
    encoding, _ = build("none", "none")
    q, k, v = random_qkv(11)
    seen = torch.arange(11)[None] >= torch.tensor([[0], [3]]) if mask else None
    for rows in ((0, 11), (7, 4), (10, 1)):
        query = TokenRange(*rows)
        part = AttentionInputs(q[:, :, query.start :], k, v, query, TokenRange(0, 11), encoding, None, key_mask=seen)
        ours, reference = SdpaBackend()(part), EagerBackend()(part)
        visible = ours.isfinite() if mask else torch.ones_like(ours, dtype=torch.bool)
        assert_close_in_rounding(ours[visible], reference[visible], terms=11, sums=3)  # scores, softmax, values


def test_chunked_keeps_memory_linear_in_the_length() -> None:
    """Memory saved by autograd grows with T, not T², in chunked attention; counted by saved-tensor hooks."""

    def kept(backend, length: int) -> int:
        encoding, processor = build("kerple_log", "cdape")
        q, k, v = (x.requires_grad_() for x in random_qkv(length, batch=1))
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backend(AttentionInputs(q, k, v, TokenRange(0, length), TokenRange(0, length), encoding, processor))
        return sum(storages.values())

    assert kept(ChunkedBackend(16), 256) <= 5 * kept(ChunkedBackend(16), 64)
    assert kept(EagerBackend(), 256) >= 12 * kept(EagerBackend(), 64)  # shows that this measurement detects T²


def test_the_backward_pass_of_row_blocks_holds_the_gradients_of_one_block() -> None:
    """The backward pass of row blocks stores key and value gradients of one block only.

    Storing all would need T² memory.
    """

    def measure_peak(length: int) -> int:
        encoding, processor = build("alibi", "none")
        q, k, v = (x.requires_grad_() for x in random_qkv(length, batch=1))
        inputs = AttentionInputs(q, k, v, TokenRange(0, length), TokenRange(0, length), encoding, processor)
        with Peak() as tracked:
            ChunkedBackend(2)(inputs).sum().backward()
        return tracked.most

    assert measure_peak(256) <= 5 * measure_peak(64)
