"""Temperatures in the model, compared with float64 formulas at all positions."""

import math
from typing import Any

import pytest
import torch
from models import SUMS, TERMS, VOCABULARY, build_model, check_masked_documents, check_reading_in_parts

from megatron.attention.segments import build_segments
from megatron.model.attention import AttentionContext
from megatron.model.gpt import GPT
from megatron.model.parameter_groups import build_parameter_groups, find_model_parts
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position import registry
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding

LENGTH, EOD = 26, 39
OPTIONS: dict[str, dict[str, Any]] = {
    "ssmax": {}, "logn": {"length": 4}, "llama4": {"floor_scale": 3, "attn_scale": 0.6},
}  # fmt: skip
NAMES = registry.list_temperatures()


def scaled_gpt(name: str, encoding: str, processor: str, backend: str = "auto", **place: Any) -> GPT:
    """Build a model with different learned factors in every layer and head, or without a temperature."""
    model = ModelOptions(
        num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=LENGTH, init_method_std=0.2,
        attention_chunk_rows=8, make_vocab_size_divisible_by=8, attention_backend=backend,
    )  # fmt: skip
    position = PositionOptions(
        pos_emb=encoding, score_processor=processor, attention_temperature=name,
        attention_temperature_options=OPTIONS.get(name, {}), **place,
    )  # fmt: skip
    gpt, generator = build_model(model, position, VOCABULARY, seed=5).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in gpt.named_parameters():
            if ".temperature." in parameter_name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.3)
    return gpt


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, EOD, (batch, length), generator=torch.Generator().manual_seed(4))


def factor(name: str, s: float, row: int, window: int | None) -> float:
    n = min(row + 1, window or row + 1)
    return {
        "ssmax": s * math.log(n),
        "logn": max(1.0, math.log(n) / math.log(4)),
        "llama4": math.log((row + 1) // 3 + 1) * 0.6 + 1,
    }[name]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_the_formula(name: str, window: int | None) -> None:
    """Attention equals softmax over visible keys of factor·q·k/√d − m·n in float64, with ALiBi's published slopes."""
    gpt = scaled_gpt(name, "alibi", "none", "eager", attention_window=window).double()
    attention = gpt.local_layers[1].self_attention.core_attention
    q, k, v = torch.randn(3, LENGTH, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = attention(q, k, v, AttentionContext(build_segments(LENGTH))).view(LENGTH, 2, 3, 8)
    learned = [p.tolist() for p in attention.temperature.parameters()] or [[1.0] * 3]
    slopes = attention.encoding.table(torch.tensor([1.0])).bias[:, 0].tolist()
    for row in range(LENGTH):
        first = 0 if window is None else max(row - window + 1, 0)
        for head in range(3):
            scale = factor(name, learned[0][head], row, window)
            products = torch.einsum("bd,jbd->bj", q[row, :, head], k[first : row + 1, :, head])
            distances = torch.arange(row - first, -1, -1, dtype=torch.float64)
            weights = torch.softmax(scale * products / 8**0.5 + slopes[head] * distances, -1)
            expected = torch.einsum("bj,jbd->bd", weights, v[first : row + 1, :, head])
            torch.testing.assert_close(found[row, :, head], expected, rtol=1e-6, atol=1e-6)  # factors are float32


PLACES = [
    ("rotary", "none", {}),
    ("kerple_log", "cdape", {"attention_window": 5}),
    ("cope", "dape", {}),
    ("fire", "none", {"randomized_positions": LENGTH + 20}),
    ("transformer_xl", "cdape", {}),
]


@pytest.mark.parametrize(("encoding", "processor", "place"), PLACES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decoding_padding_and_the_last_tokens_are_the_whole(
    name: str, encoding: str, processor: str, place: dict[str, Any]
) -> None:
    gpt, x = scaled_gpt(name, encoding, processor, **place), tokens()
    whole = gpt(x)
    free = scaled_gpt("none", encoding, processor, **place)(x)
    assert (whole - free).abs().max() > 1e-3
    check_reading_in_parts(gpt, x, has_sampled_positions="randomized_positions" in place)


@pytest.mark.parametrize(
    ("encoding", "processor", "backend"),
    [
        ("rotary", "none", "sdpa"),
        ("kerple_log", "cdape", "chunked"),
        ("fire", "cdape", "auto"),
        ("none", "none", "eager"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_masked_documents_match_separate_ones(name: str, encoding: str, processor: str, backend: str) -> None:
    gpt = scaled_gpt(name, encoding, processor, backend, attention_mask="document")
    check_masked_documents(gpt, tokens())


@pytest.mark.parametrize("name", NAMES)
def test_backends_agree_in_losses_and_gradients(name: str) -> None:
    for encoding, processor, backends in (
        ("rotary", "none", ("sdpa", "eager", "chunked")),
        ("kerple_log", "cdape", ("auto", "eager", "chunked")),
    ):
        results = []
        for backend in backends:
            gpt = scaled_gpt(name, encoding, processor, backend).train()
            x = tokens()
            loss = gpt(x, x).mean()
            gradients = torch.autograd.grad(loss, list(gpt.parameters()))
            assert all(gradient.isfinite().all() for gradient in gradients)
            results.append((loss, *gradients))
        for other in results[1:]:
            for one, expected in zip(other, results[0], strict=True):
                assert_close_in_rounding(one, expected, 2 * LENGTH * TERMS, 2 * SUMS)


def test_its_parameters_are_not_decayed_and_stepped_by_adamw_beside_muon() -> None:
    gpt = scaled_gpt("ssmax", "rotary", "dape")
    own = {name: p for name, p in gpt.named_parameters() if ".temperature." in name}
    assert {tuple(p.shape) for p in own.values()} == {(3,)}
    assert len(own) == 2
    for algorithm in ("AdamW", "Muon", "Lion"):
        groups = build_parameter_groups(gpt, 0.1, algorithm)
        of_own = [group for group in groups if any(p is q for p in group["params"] for q in own.values())]
        assert [group["weight_decay"] for group in of_own] == [0.0]
        assert [group["algorithm"] for group in of_own] == ["Lion" if algorithm == "Lion" else "AdamW"]
    assert {find_model_parts(gpt)[name] for name in own} == {"attention temperature"}


def test_ssmax_starts_at_the_value_of_its_option() -> None:
    model = ModelOptions(num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=LENGTH)
    position = PositionOptions(attention_temperature="ssmax", attention_temperature_options={"s": 0.43})
    gpt = build_model(model, position, VOCABULARY, seed=1)
    plain = build_model(model, PositionOptions(), VOCABULARY, seed=1)
    weights, others = dict(gpt.named_parameters()), dict(plain.named_parameters())
    assert all(torch.equal(weights[name], other) for name, other in others.items()), "it draws nothing"
    assert all(torch.equal(weights[name], torch.full((3,), 0.43)) for name in weights.keys() - others.keys())


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attention_temperature_options": {"s": 1.0}}, "attention_temperature_options are given, but"),
        (
            {"attention_temperature": "foo"},
            "attention_temperature: unknown temperature 'foo'; choose from llama4, logn",
        ),
        (
            {"attention_temperature": "logn", "attention_temperature_options": {"length": 1}},
            "attention_temperature: option length of logn is 1",
        ),
    ],
)
def test_unsupported_models_are_rejected(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        build_model(
            ModelOptions(num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=LENGTH),
            PositionOptions(**keys),
            VOCABULARY,
        )
