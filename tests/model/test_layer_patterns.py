"""Layers with different encodings, windows or processors, compared with a float64 model and with uniform models."""

from typing import Any

import pytest
import torch
from models import build_model
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding, compute_tolerance, count_gpt_sums

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 40, 32, 4, 4, 22
TERMS, SUMS = count_gpt_sums(WIDTH, layers=LAYERS)
PATTERNS: dict[str, dict[str, Any]] = {
    "SWAN": {"pos_emb": ["rotary", "rotary", "rotary", "none"], "attention_window": [6, 6, 6, None]},
    "periods of two and four": {"pos_emb": ["alibi", "rotary"], "attention_window": [5, None, 9, 4]},
    "Gemma 3": {
        "pos_emb": ["rotary_local", "rotary"],
        "attention_window": [6, None],
        "pos_emb_options": {"local_base": 50.0},
    },
    "windows alone": {"pos_emb": "alibi", "attention_window": [4, None]},
}
MIXED: dict[str, dict[str, Any]] = {
    **PATTERNS,
    "processor in global layers": {
        "pos_emb": ["kerple_log", "kerple_log", "rotary", "fire"], "attention_window": [5, 5, None, None],
        "score_processor": ["none", "cdape"], "score_processor_options": {"kernel_size": 3},
    },
    "each its own": {
        "pos_emb": ["kerple_log", "t5"], "score_processor": ["dape", "none"], "attention_window": [7, 3],
        "pos_emb_per_layer": True,
    },
    "temperature in global layers": {
        "pos_emb": ["none", "rotary"], "attention_window": [None, 6], "attention_temperature": ["logn", "none"],
        "attention_temperature_options": {"length": 5},
    },
}  # fmt: skip


def build(model: dict[str, Any] | None = None, **position: Any) -> GPT:
    options = ModelOptions(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, seq_length=LENGTH, attention_chunk_rows=5,
        init_method_std=0.2, make_vocab_size_divisible_by=8, use_bias_in_mlp=False, **(model or {}),
    )  # fmt: skip
    return build_model(options, PositionOptions(**position), VOCABULARY, seed=5).eval()


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(3))


def plain_gpt(state: dict[str, Tensor], x: Tensor, encodings: list[str], windows: list[int | None]) -> Tensor:
    """Compute logits [B, T, V] in float64, layer by layer: RoPE, ALiBi or none, with or without a window."""
    places = torch.arange(x.shape[1], dtype=torch.float64)
    distance = places[:, None] - places

    def normalized(name: str, y: Tensor) -> Tensor:
        y = y - y.mean(-1, keepdim=True)
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def turned(y: Tensor, base: float) -> Tensor:
        half = y.shape[-1] // 2
        angle = places[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = y[..., :half], y[..., half:]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    hidden = state["embedding.word_embeddings.weight"][x]
    for index in range(LAYERS):
        layer, encoding = f"decoder.layers.{index}", encodings[index % len(encodings)]
        window = windows[index % len(windows)]
        mixed = linear(f"{layer}.self_attention.linear_qkv", normalized(f"{layer}.input_layernorm", hidden))
        q, k, v = mixed.unflatten(-1, (HEADS, 3, WIDTH // HEADS)).unbind(-2)
        if base := {"rotary": 10000.0, "rotary_local": 50.0}.get(encoding):
            q, k = turned(q, base), turned(k, base)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / (WIDTH // HEADS) ** 0.5
        if encoding == "alibi":
            slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1, dtype=torch.float64) / HEADS)
            scores = scores - slopes[:, None, None] * distance
        hidden_keys = (distance < 0) | (distance >= (window or LENGTH))
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        hidden = hidden + linear(f"{layer}.self_attention.linear_proj", attended)
        inner = linear(f"{layer}.mlp.linear_fc1", normalized(f"{layer}.pre_mlp_layernorm", hidden))
        hidden = hidden + linear(f"{layer}.mlp.linear_fc2", torch.nn.functional.gelu(inner))
    return normalized("decoder.final_layernorm", hidden) @ state["embedding.word_embeddings.weight"].T


@pytest.mark.parametrize("name", PATTERNS)
@torch.no_grad()
def test_logits_match_the_formula(name: str) -> None:
    keys, x = PATTERNS[name], tokens()
    gpt = build(**keys)
    state = {key: parameter.double() for key, parameter in gpt.named_parameters()}
    encodings = keys["pos_emb"] if isinstance(keys["pos_emb"], list) else [keys["pos_emb"]]
    wanted = plain_gpt(state, x, encodings, keys["attention_window"])
    assert_close_in_rounding(gpt(x), wanted.float(), TERMS, SUMS)
    other = plain_gpt(state, x, encodings, [None])
    assert (wanted - other).abs().max() > 100 * compute_tolerance(TERMS, SUMS), "the windows matter"


@pytest.mark.parametrize("name", MIXED)
@torch.no_grad()
def test_each_layer_is_that_of_a_model_of_its_kind(name: str) -> None:
    keys, hidden = MIXED[name], torch.randn(LENGTH, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    gpt = build(**keys)
    for index, layer in enumerate(gpt.decoder.layers):
        single = {key: value[index % len(value)] if isinstance(value, list) else value for key, value in keys.items()}
        if single.get("score_processor", "none") == "none":
            single.pop("score_processor_options", None)
        if single.get("attention_temperature", "none") == "none":
            single.pop("attention_temperature_options", None)
        if single["pos_emb"] != "rotary_local":
            single.pop("pos_emb_options", None)
        same = build(**single)
        attention, target = layer.self_attention.core_attention, same.decoder.layers[index]
        target.load_state_dict(layer.state_dict())
        target.self_attention.core_attention.encoding.load_state_dict(attention.encoding.state_dict())
        assert torch.equal(layer(hidden), target(hidden))


@pytest.mark.parametrize("name", MIXED)
@torch.no_grad()
def test_the_cache_keeps_windows_and_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.kv_cache.WINDOW_SLACK", 2)
    gpt, x = build(**MIXED[name]), tokens()
    wanted, mask = gpt(x), torch.ones_like(tokens(), dtype=torch.bool)
    mask[0, :8] = False
    padded = gpt(x, attention_mask=mask)
    for attention_mask, logits in ((None, wanted), (mask, padded)):
        cache, found, stop = gpt.create_kv_cache(LENGTH), [], 0
        for part in x.split([9, 1, 1, 1, 4, 1, 1, 1, 3], 1):
            stop += part.shape[1]
            given = None if attention_mask is None else attention_mask[:, :stop]
            found.append(gpt(part, kv_cache=cache, attention_mask=given))
        assert_close_in_rounding(torch.cat(found, 1)[mask], logits[mask], TERMS, SUMS)
    whole = build(**{**MIXED[name], "attention_window": None}).create_kv_cache(LENGTH)
    build(**{**MIXED[name], "attention_window": None})(x, kv_cache=whole)
    assert cache.count_bytes() < whole.count_bytes()


@pytest.mark.parametrize("backend", ["chunked", "auto"])
@torch.no_grad()
def test_documents_are_read_as_if_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.kv_cache.WINDOW_SLACK", 2)
    keys = {**MIXED["processor in global layers"], "attention_mask": "document"}
    gpt, x = build({"attention_backend": backend}, **keys), tokens(1)
    starts = torch.tensor([[0] * 9 + [9] * 13])
    alone = torch.cat([gpt(x[:, :9]), gpt(x[:, 9:])], 1)
    assert_close_in_rounding(gpt(x, document_starts=starts), alone, TERMS, SUMS)
    cache, found, stop = gpt.create_kv_cache(LENGTH), [], 0
    for part in x.split([12, 1, 1, 5, 1, 2], 1):
        stop += part.shape[1]
        found.append(gpt(part, kv_cache=cache, document_starts=starts[:, :stop]))
    assert_close_in_rounding(torch.cat(found, 1), alone, TERMS, SUMS)


def test_layers_are_causal_and_share_equal_modules() -> None:
    gpt, x = build(**MIXED["processor in global layers"]), tokens()
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCABULARY
    assert torch.equal(gpt(x)[:, :12], gpt(changed)[:, :12])
    encodings = [layer.self_attention.core_attention.encoding for layer in gpt.decoder.layers]
    assert encodings[0] is encodings[1]
    assert [name for name, _ in gpt.positions.named_children()] == ["kerple_log", "rotary", "fire"]
    gpt(x).sum().backward()
    assert all(parameter.grad is not None for parameter in gpt.parameters())


def test_recomputation_changes_nothing() -> None:
    gradients = []
    for recomputed in (False, True, "selective"):
        keys = {"checkpoint_activations": recomputed, "checkpoint_num_layers": 3 if recomputed is True else 1}
        gpt, x = build(keys, **MIXED["processor in global layers"]).train(), tokens()
        gpt(x, x).sum().backward()
        gradients.append([parameter.grad for parameter in gpt.parameters()])
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0], strict=True))


def test_one_value_is_one_value_however_it_is_written() -> None:
    listed, single = (
        build(pos_emb=["kerple_log"] * 4, attention_window=[5, 5]),
        build(pos_emb="kerple_log", attention_window=5),
    )
    assert list(listed.state_dict()) == list(single.state_dict())
    assert torch.equal(listed(tokens()), single(tokens()))
    assert PositionOptions(pos_emb=["none", "rotary"] * 2).pos_emb == ["none", "rotary"]


@pytest.mark.parametrize(
    ("model", "position", "message"),
    [
        ({}, {"pos_emb": ["rotary", "rotary", "none"]}, "pos_emb is a pattern of 3 layers, which does not divide"),
        ({}, {"attention_window": [5, None] + [4] * 6}, "attention_window is a pattern of 8 layers"),
        ({}, {"pos_emb": ["learned", "rotary"]}, "learned adds to the token embeddings"),
        ({"attention_backend": "sdpa"}, {"pos_emb": ["rotary", "alibi"]}, "attention_backend 'sdpa'"),
        ({}, {"pos_emb": ["none", "cope"], "pos_emb_options": {"base": 5}}, "pos_emb_options.base: no layer"),
        (
            {"query_pre_attn_scalar": 4.0},
            {"pos_emb": ["rotary", "cope"]},
            "query_pre_attn_scalar: 4, but pos_emb cope computes its own products",
        ),
    ],
)
def test_invalid_combinations_are_rejected_in_one_line(model: dict, position: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[")) as refusal:
        build(model, **position)
    assert "\n" not in str(refusal.value)
