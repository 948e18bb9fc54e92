"""GPT, compared with a plain PyTorch model, and GPT-NeoX's layer options."""

import math
from typing import Any

import pytest
import torch
from models import build_model
from torch.nn import functional as F

from megatron.kernels.cdape_attention import cpu
from megatron.model.parameter_groups import build_parameter_groups
from megatron.options.model import ModelOptions, get_padded_vocab_size
from megatron.options.position import PositionOptions
from megatron.utils.errors import UserError
from tools.bench.plain_gpt import PlainGPT
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY = 61
TERMS, SUMS = count_gpt_sums(24, layers=2)


def options(**changes) -> ModelOptions:
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "seq_length": 20}
    return ModelOptions(**{**shape, "make_vocab_size_divisible_by": 8, **changes})


def position(name: str = "none", processor: str = "none", **changes) -> PositionOptions:
    return PositionOptions(pos_emb=name, score_processor=processor, **changes)


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def _copy_into_plain(gpt, plain: PlainGPT) -> None:
    """Copy weights; megatron-core interleaves q, k, v per head, and the plain model concatenates them."""
    heads = gpt.config.num_attention_heads
    with torch.no_grad():
        plain.embedding.weight.copy_(gpt.embedding.word_embeddings.weight)
        plain.norm.load_state_dict(gpt.decoder.final_layernorm.state_dict())
        if plain.kerple is not None:
            plain.kerple.r1.copy_(gpt.position.r1.value[:, None, None])
            plain.kerple.r2.copy_(gpt.position.r2.value[:, None, None])
        for ours, theirs in zip(gpt.decoder.layers, plain.blocks, strict=True):
            theirs.norm1.load_state_dict(ours.input_layernorm.state_dict())
            theirs.norm2.load_state_dict(ours.pre_mlp_layernorm.state_dict())
            for a, b in ((ours.self_attention.linear_qkv, theirs.qkv), (ours.self_attention.linear_proj, theirs.proj)):
                for name in ("weight", "bias"):
                    value = getattr(a, name)
                    if b is theirs.qkv:
                        value = value.view(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
                    getattr(b, name).copy_(value)
            theirs.up.load_state_dict({k: v for k, v in ours.mlp.linear_fc1.state_dict().items() if v is not None})
            theirs.down.load_state_dict({k: v for k, v in ours.mlp.linear_fc2.state_dict().items() if v is not None})


@pytest.mark.parametrize("method", ["none", "rotary", "kerple_log"])
def test_equals_a_plain_pytorch_gpt(method: str) -> None:
    gpt = build_model(options(), position(method), VOCABULARY, seed=3)
    with torch.no_grad():
        for parameter in gpt.parameters():  # biases too, to detect swapped ones
            parameter.add_(torch.randn_like(parameter) * 0.05)
    plain = PlainGPT(2, 24, 3, 20, get_padded_vocab_size(options(), VOCABULARY), method)
    _copy_into_plain(gpt, plain)
    x = tokens()
    assert_close_in_rounding(gpt(x), plain(x), TERMS, SUMS)
    labels = tokens()
    losses = F.cross_entropy(plain(x).transpose(1, 2), labels, reduction="none")
    assert_close_in_rounding(gpt(x, labels), losses, TERMS, SUMS)
    gpt(x, labels).mean().backward()
    losses.mean().backward()
    assert_close_in_rounding(
        gpt.embedding.word_embeddings.weight.grad, plain.embedding.weight.grad, TERMS, 2 * SUMS, size=0
    )
    if method == "kerple_log":  # one number from all entries of a head's map, in two layers
        terms = 2 * x.numel() * 20 / 2
        assert_close_in_rounding(
            gpt.position.r1.value.grad, plain.kerple.r1.grad.flatten(), int(terms), 2 * SUMS, size=0
        )


@pytest.mark.parametrize("tied", [False, True])
def test_parallel_residual(tied: bool) -> None:
    """GPT-J's layer: x + attention(norm1(x)) + mlp(norm2(x)), with one norm for both if tied."""
    gpt = build_model(options(gpt_j_residual=True, gpt_j_tied=tied, num_layers=1), position(), VOCABULARY, seed=3)
    layer = gpt.decoder.layers[0]
    x = torch.randn(20, 2, 24)
    attention, bias1 = layer.self_attention(layer.input_layernorm(x), attention_mask=None)
    norm = layer.input_layernorm if tied else layer.pre_mlp_layernorm
    mlp, bias2 = layer.mlp(norm(x))
    assert_close_in_rounding(layer(x), x + attention + bias1 + mlp + bias2, terms=5)
    assert tied == (not any("pre_mlp_layernorm" in name for name, _ in gpt.named_parameters()))


def test_last_scores_only_the_end_and_equals_the_whole() -> None:
    gpt = build_model(options(), position("alibi"), VOCABULARY, seed=3)
    x, labels = tokens(), tokens()
    for last in (1, 5, 20, 30):
        assert_close_in_rounding(gpt(x, num_logits=last), gpt(x)[:, -last:], TERMS, SUMS)
        assert_close_in_rounding(gpt(x, labels, num_logits=last), gpt(x, labels)[:, -last:], TERMS, SUMS)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("method", "processor", "keys"),
    [
        ("kerple_log", "cdape", {"attention_backend": "chunked", "attention_chunk_rows": 3}),
        ("transformer_xl", "none", {}),
        ("cope", "dape", {"gpt_j_residual": True}),
        ("learned", "cdape", {"gpt_j_residual": True, "gpt_j_tied": True}),
        ("rotary", "none", {"num_layers": 1}),
    ],
)
def test_the_last_layer_computes_only_scored_positions(
    method: str, processor: str, keys: dict[str, Any], padded: bool
) -> None:
    gpt = build_model(options(**keys), position(method, processor), VOCABULARY, seed=3)
    x, mask = tokens(), None
    if padded:
        mask = torch.ones_like(x, dtype=torch.bool)
        mask[0, :3], mask[1, :17] = False, False
    some, all_ = (gpt(x, num_logits=last, attention_mask=mask)[:, -6:] for last in (6, None))
    seen = slice(None) if mask is None else mask[:, -6:]
    assert_close_in_rounding(some[seen], all_[seen], TERMS, SUMS)
    shapes: list[torch.Size] = []
    hooks = [layer.mlp.register_forward_hook(lambda _, x, __: shapes.append(x[0].shape)) for layer in gpt.local_layers]
    gpt(x, num_logits=6, attention_mask=mask)
    assert [shape[0] for shape in shapes] == [20] * (len(hooks) - 1) + [6]


@torch.no_grad()
def test_a_prompt_that_is_scored_at_its_end_fills_the_cache_whole() -> None:
    gpt = build_model(options(), position("kerple_log", "cdape"), VOCABULARY, seed=3)
    x = tokens()
    cache = gpt.create_kv_cache(20)
    assert_close_in_rounding(gpt(x[:, :12], num_logits=1, kv_cache=cache), gpt(x[:, :12])[:, -1:], TERMS, SUMS)
    assert_close_in_rounding(gpt(x[:, 12:], num_logits=2, kv_cache=cache), gpt(x)[:, -2:], TERMS, SUMS)


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize(
    ("encoding", "processor", "backend", "keys"),
    [
        ("kerple_log", "none", "auto", {}),
        ("rotary", "none", "sdpa", {"use_qk_layernorm": True, "num_kv_heads": 1}),
        ("rotary", "none", "sdpa", {"hidden_dropout": 0.2, "attention_dropout": 0.3}),
        pytest.param(
            *("kerple_log", "cdape", "native", {}),
            marks=pytest.mark.skipif(cpu.describe_unavailable() is not None, reason=str(cpu.describe_unavailable())),
        ),
        ("kerple_log", "cdape", "chunked", {"hidden_dropout": 0.2, "attention_dropout": 0.3}),
        ("cope", "dape", "eager", {"attention_dropout": 0.3}),
    ],
)
def test_recomputed_activations_change_nothing(
    encoding: str, processor: str, backend: str, keys: dict[str, Any], layers: int
) -> None:
    """Recomputation of all layers, some layers, or (0) attention alone gives the same losses, gradients and random
    state.
    """
    x, labels = tokens(), tokens()
    recomputed = {"checkpoint_activations": True, "checkpoint_num_layers": layers}
    results = []
    for recompute in ({}, recomputed if layers else {"checkpoint_activations": "selective"}):
        chosen = options(num_layers=3, attention_chunk_rows=7, **keys, **recompute)
        gpt = build_model(chosen, position(encoding, processor), VOCABULARY, seed=3, backend=backend)
        torch.manual_seed(5)
        loss = gpt(x, labels).mean()
        loss.backward()
        results.append((loss, torch.get_rng_state(), *(p.grad for p in gpt.parameters() if p.grad is not None)))
    assert len(results[0]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["eager", "chunked"])
@pytest.mark.parametrize("processor", ["none", "cdape"])
def test_backends_agree_in_the_model(backend: str, processor: str) -> None:
    x, labels = tokens(), tokens()
    reference = build_model(options(), position("none", processor), VOCABULARY, seed=3, backend="eager")
    other = "sdpa" if processor == "none" and backend == "eager" else backend
    gpt = build_model(options(attention_chunk_rows=7), position("none", processor), VOCABULARY, seed=3, backend=other)
    assert_close_in_rounding(gpt(x, labels), reference(x, labels), TERMS, SUMS)


def test_dropout_only_in_training() -> None:
    gpt = build_model(options(hidden_dropout=0.3, attention_dropout=0.3), position(), VOCABULARY, seed=3)
    x = tokens()
    assert not torch.equal(gpt(x), gpt(x))
    gpt.eval()
    assert torch.equal(gpt(x), gpt(x))


def test_no_grad_keeps_no_graph() -> None:
    gpt = build_model(options(), position("t5"), VOCABULARY, seed=3)
    with torch.no_grad():
        assert not gpt(tokens()).requires_grad


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / math.sqrt(8)),
        ("small_init", math.sqrt(2 / (5 * 128))),
        ("wang_init", 2 / 4 / math.sqrt(128)),
        ("xavier_normal", math.sqrt(2 / (128 + 512))),
    ],
)
def test_initialisation(name: str, deviation: float) -> None:
    chosen = options(
        num_layers=4, hidden_size=128, num_attention_heads=4, init_method=name, output_layer_init_method=name
    )
    gpt = build_model(chosen, position(), VOCABULARY, seed=3)
    layer = gpt.decoder.layers[1]
    for weight in (layer.mlp.linear_fc1.weight, layer.mlp.linear_fc2.weight):
        assert abs(weight.std().item() / deviation - 1) < 0.03
        assert abs(weight.mean().item()) < deviation * 0.02
    assert layer.mlp.linear_fc1.bias.abs().max() == 0


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("mlp", [True, False])
def test_biases_of_attention_and_mlp_are_set_separately(attention: bool, mlp: bool) -> None:
    chosen = options(use_bias_in_attn_linear=attention, use_bias_in_mlp=mlp)
    gpt = build_model(chosen, position(), VOCABULARY, seed=3)
    names = {name for name, _ in gpt.named_parameters()}
    for layer in range(chosen.num_layers):
        for module, there in (("self_attention.linear_qkv", attention), ("self_attention.linear_proj", attention),
                              ("mlp.linear_fc1", mlp), ("mlp.linear_fc2", mlp)):  # fmt: skip
            assert (f"decoder.layers.{layer}.{module}.bias" in names) == there
    assert gpt(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize(("given", "multiple", "width"), [(None, 1, 96), (None, 40, 120), (50, 16, 64), (64, 16, 64)])
def test_the_feed_forward_width_is_rounded_up(given: int | None, multiple: int, width: int) -> None:
    chosen = options(hidden_size=24, intermediate_size=given, mlp_multiple_of=multiple)
    layer = build_model(chosen, position(), VOCABULARY, seed=3).decoder.layers[0]
    assert layer.mlp.linear_fc1.weight.shape == (width, 24)
    assert layer.mlp.linear_fc2.weight.shape == (24, width)


def test_weights_depend_on_the_seed_alone() -> None:
    a, b, c = (build_model(options(), position("kerple_log", "cdape"), VOCABULARY, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.word_embeddings.weight, c.embedding.word_embeddings.weight)


def test_parameter_groups_cover_every_parameter_once() -> None:
    gpt = build_model(options(), position("kerple_power", "cdape", pos_emb_per_layer=True), VOCABULARY, seed=3)
    groups = build_parameter_groups(gpt, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in gpt.parameters())
    names = {id(p): name for name, p in gpt.named_parameters()}
    for group in groups:
        for p in group["params"]:
            name = names[id(p)]
            assert (group["weight_decay"] > 0) == (p.dim() >= 2 and ".position." not in f".{name}"), name
            if name.endswith("r2.value"):
                assert (group["low"], group["high"]) == (0.01, 2.0)


@pytest.mark.parametrize(("per_layer", "copies"), [(False, 1), (True, 2)])
def test_position_parameters_are_shared_or_per_layer(per_layer: bool, copies: int) -> None:
    gpt = build_model(options(), position("kerple_log", pos_emb_per_layer=per_layer), VOCABULARY, seed=3)
    assert sum(name.endswith("r1.value") for name, _ in gpt.named_parameters()) == copies
    gpt(tokens(), tokens()).mean().backward()
    assert all(p.grad is not None for p in gpt.parameters())


def test_parameter_count_and_flops_are_the_closed_formulas() -> None:
    layers, width, length, heads, k, w = 2, 24, 20, 3, 5, 7
    processor = {"width": w, "kernel_size": k}
    gpt = build_model(
        options(no_weight_tying=True), position("t5", "cdape", score_processor_options=processor), VOCABULARY, seed=3
    )
    padded = 64
    block = 12 * width**2 + 13 * width
    cdape = 2 * heads * w * k + w + w * heads * k + heads
    assert gpt.num_parameters() == layers * (block + cdape) + 2 * width + 2 * padded * width + 32 * heads
    matrices = layers * 12 * width**2 + padded * width
    per_score = layers * (4 * width + 4 * k * heads * w)
    assert gpt.count_flops_per_token(length) == 3 * (2 * matrices + per_score * (length + 1) / 2)


@pytest.mark.parametrize(("name", "products"), [("alibi", 0), ("transformer_xl", 4.5), ("cope", 64)])
def test_flops_of_contextual_terms_and_windows(name: str, products: float) -> None:
    """Twenty tokens see 1, 2, 3, 4 and then 5 keys each: 4.5 on average; d·H = 24."""
    gpt = build_model(options(), position(name, attention_window=5), VOCABULARY, seed=3)
    free = build_model(options(), position("none", attention_window=5), VOCABULARY, seed=3)
    layers = 2
    extra = gpt.count_flops_per_token(20) - free.count_flops_per_token(20)
    assert extra == pytest.approx(3 * layers * 2 * 24 * products)
    whole = build_model(options(), position("none"), VOCABULARY, seed=3)
    difference = whole.count_flops_per_token(20) - free.count_flops_per_token(20)
    assert difference == pytest.approx(3 * layers * 4 * 24 * (10.5 - 4.5))


@pytest.mark.parametrize(("name", "limit"), [("learned", 20), ("kerple_log", None)])
def test_length_past_the_position_table(name: str, limit: int | None) -> None:
    gpt = build_model(options(), position(name), VOCABULARY, seed=3)
    assert gpt.max_length == limit
    if limit is None:
        assert gpt(tokens(1, 45)).isfinite().all()
    else:
        with pytest.raises(UserError, match="end at 20"):
            gpt(tokens(1, 21))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "relu"])
def test_norms_and_activations_build_and_learn(norm: str, activation: str) -> None:
    gpt = build_model(options(norm=norm, activation=activation), position("alibi"), VOCABULARY, seed=3)
    x = tokens(4)
    optimizer = torch.optim.AdamW(gpt.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = gpt(x, x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("model", "place", "backend", "complaint"),
    [
        ({}, {"name": "kerple_logg"}, None, "did you mean kerple_log"),
        ({}, {"name": "rotary", "pos_emb_options": {"fraction": 3.0}}, None, "fraction of rotary is 3.0"),
        (
            {},
            {"processor": "cdape", "score_processor_options": {"kernel_size": 4}},
            None,
            "must be a positive odd number",
        ),
        ({}, {"score_processor_options": {"kernel_size": 3}}, None, "score_processor is none"),
        ({}, {"name": "kerple_log"}, "sdpa", r"choose from auto, (triton, )?eager, chunked"),
        ({}, {"name": "learned", "pos_emb_per_layer": True}, None, "pos_emb_per_layer"),
        ({"num_attention_heads": 5}, {}, None, "hidden_size 24 is not divisible by num_attention_heads 5"),
        ({"hidden_size": 27}, {"name": "sinusoidal"}, None, "even hidden_size"),
    ],
)
def test_unsupported_models_are_rejected_by_name(model: dict, place: dict, backend, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        build_model(options(**model), position(**place), VOCABULARY, backend=backend)
