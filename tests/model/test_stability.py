"""Query-key norms, norm placement, soft caps and z-loss, compared with float64 formulas."""

from typing import Any

import pytest
import torch
from models import build_model
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.model.parameter_groups import build_parameter_groups
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY, WIDTH, HEADS, LENGTH = 40, 32, 4, 18
TERMS, SUMS = count_gpt_sums(WIDTH, layers=2)
PER_HEAD = {"use_qk_layernorm": True}
CASES: dict[str, dict[str, Any]] = {
    "layernorm": PER_HEAD,
    "rmsnorm, grouped": {**PER_HEAD, "qk_norm": "rmsnorm", "num_kv_heads": 2},
    "layernorm over heads": {**PER_HEAD, "qk_layernorm_over_heads": True, "num_kv_heads": 2},
    "rmsnorm over heads, post": {
        **PER_HEAD, "qk_layernorm_over_heads": True, "norm": "rmsnorm", "norm_placement": "post", "num_kv_heads": 2,
    },
    "caps, sandwich": {
        "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "norm": "rmsnorm", "norm_placement": "sandwich",
        "activation": "geglu_tanh", "embedding_multiplier": 5.5, "residual_multiplier": 0.22, "rms_norm_epsilon": 1e-6,
    },
    "heads of their own size": {"head_dim": 12, "num_kv_heads": 2, "use_bias_in_attn_linear": False},
    "layernorm over heads, no bias": {
        **PER_HEAD, "qk_layernorm_over_heads": True, "layernorm_bias": False, "logit_scale": 0.3,
        "norm_placement": "sandwich",
    },
    "parallel": {**PER_HEAD, "gpt_j_residual": True, "head_dim": 6, "final_logit_softcapping": 3.0},
}  # fmt: skip


def built(seed: int = 5, pos_emb: str = "alibi", processor: str = "none", **keys: Any) -> GPT:
    model = ModelOptions(
        **{"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": HEADS, "seq_length": LENGTH,
        "attention_chunk_rows": 5, "init_method_std": 0.2, "make_vocab_size_divisible_by": 8, **keys},
    )  # fmt: skip
    gpt = build_model(model, PositionOptions(pos_emb=pos_emb, score_processor=processor), VOCABULARY, seed=seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norm weights too
    return gpt


def plain_gpt(state: dict[str, Tensor], x: Tensor, keys: dict[str, Any]) -> Tensor:
    """Compute the logits [B, T, V] of a GPT with ALiBi and tied embeddings by the papers' formulas, from float64
    weights.
    """
    heads, groups = HEADS, keys.get("num_kv_heads", HEADS)
    head, norm = keys.get("head_dim", WIDTH // HEADS), keys.get("norm", "layernorm")
    place, cap = keys.get("norm_placement", "pre"), keys.get("attn_logit_softcapping")

    def normalized(name: str, x: Tensor, kind: str = norm) -> Tensor:
        if kind == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + (1e-5 if kind == "layernorm" else epsilon)).sqrt()
        return x * state[f"{name}.weight"] + state.get(f"{name}.bias", 0.0)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def attention(name: str, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        mixed = linear(f"{name}.linear_qkv", x).view(batch, length, groups, heads // groups + 2, head)
        q, k, v = mixed[:, :, :, :-2].flatten(2, 3), mixed[:, :, :, -2], mixed[:, :, :, -1]
        if keys.get("use_qk_layernorm"):
            kind, over = keys.get("qk_norm", norm), keys.get("qk_layernorm_over_heads")
            q, k = (
                normalized(f"{name}.{which}_layernorm", y.flatten(2) if over else y, kind).view(y.shape)
                for which, y in (("q", q), ("k", k))
            )
        k, v = (y.repeat_interleave(heads // groups, 2) for y in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / head**0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(length, dtype=torch.float64)
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        distance = places[:, None] - places
        scores = scores - slopes[:, None, None] * distance
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        return linear(f"{name}.linear_proj", torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    def mlp(name: str, x: Tensor) -> Tensor:
        x = linear(f"{name}.linear_fc1", x)
        if keys.get("activation") == "geglu_tanh":
            gate, x = x.chunk(2, -1)
            return linear(f"{name}.linear_fc2", torch.nn.functional.gelu(gate, approximate="tanh") * x)
        return linear(f"{name}.linear_fc2", torch.nn.functional.gelu(x))

    epsilon = keys.get("rms_norm_epsilon", 1e-8)
    embedding = state["embedding.word_embeddings.weight"]
    hidden = embedding[x] * keys.get("embedding_multiplier", 1.0)
    for index in range(2):
        layer = f"decoder.layers.{index}"
        before = {"post": None}.get(place, "input_layernorm"), {"post": None}.get(place, "pre_mlp_layernorm")
        after = {"pre": (None, None)}.get(place, ("post_self_attn_layernorm", "post_mlp_layernorm"))
        entered = hidden
        for branch, name, first, second in zip((attention, mlp), ("self_attention", "mlp"), before, after, strict=True):
            read = entered if keys.get("gpt_j_residual") else hidden
            y = branch(f"{layer}.{name}", read if first is None else normalized(f"{layer}.{first}", read))
            y = y if second is None else normalized(f"{layer}.{second}", y)
            hidden = hidden + keys.get("residual_multiplier", 1.0) * y
    logits = normalized("decoder.final_layernorm", hidden) @ embedding.T * keys.get("logit_scale", 1.0)
    final_cap = keys.get("final_logit_softcapping")
    return logits if final_cap is None else final_cap * torch.tanh(logits / final_cap)


@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_log_z_match_the_formula(name: str) -> None:
    gpt = built(**CASES[name])
    x, labels = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    exact = {key: p.detach().double().requires_grad_() for key, p in gpt.named_parameters()}
    wanted = plain_gpt(exact, x, CASES[name])
    assert_close_in_rounding(gpt(x).detach(), wanted.detach().float(), TERMS, SUMS)
    log_z = wanted.logsumexp(-1)
    losses = log_z - wanted.gather(-1, labels[..., None])[..., 0]
    (losses.mean() + 0.1 * log_z.square().mean()).backward()
    largest = max(p.grad.abs().max().item() for p in exact.values() if p.grad is not None)
    for together in (2 * VOCABULARY * LENGTH, 2 * VOCABULARY * 5):
        gpt.max_logits = together
        gpt.zero_grad()
        found = gpt(x, labels, with_log_z=True)
        assert torch.equal(found[0], gpt(x, labels))
        assert_close_in_rounding(found.detach(), torch.stack([losses, log_z]).detach().float(), TERMS, SUMS)
        (found[0].mean() + 0.1 * found[1].square().mean()).backward()
        for key, parameter in gpt.named_parameters():
            assert_close_in_rounding(parameter.grad, exact[key].grad.float(), TERMS, 2 * SUMS, size=largest / 100)


@pytest.mark.parametrize("pair", [("none", "none"), ("kerple_log", "cdape"), ("cope", "none"), ("rotary", "dape")])
@torch.no_grad()
def test_every_backend_and_the_cache_compute_the_same(pair: tuple[str, str]) -> None:
    keys = {**PER_HEAD, "qk_norm": "rmsnorm", "attn_logit_softcapping": 1.5, "num_kv_heads": 2}
    x = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :4] = False
    wanted, padded = (built(5, *pair, attention_backend="eager", **keys)(x, attention_mask=m) for m in (None, mask))
    uncapped = built(5, *pair, **{**keys, "attn_logit_softcapping": None})(x)
    assert (uncapped - wanted).abs().max() > 100 * (TERMS + SUMS) * 2**-24
    for backend in ("auto", "chunked"):
        gpt = built(5, *pair, attention_backend=backend, **keys).eval()
        assert_close_in_rounding(gpt(x), wanted, TERMS, SUMS)
        assert_close_in_rounding(gpt(x, attention_mask=mask)[:, 4:], padded[:, 4:], TERMS, SUMS)
        cache = gpt.create_kv_cache(LENGTH)
        parts = [gpt(part, kv_cache=cache) for part in x.split([7, 1, 1, 9], 1)]
        assert_close_in_rounding(torch.cat(parts, 1), wanted, TERMS, SUMS)


def test_norms_of_queries_and_keys_are_not_decayed() -> None:
    gpt = built(**PER_HEAD, norm_placement="sandwich")
    names = {id(p): name for name, p in gpt.named_parameters()}
    groups = {group["name"]: {names[id(p)] for p in group["params"]} for group in build_parameter_groups(gpt, 0.1)}
    norms = {name for name in names.values() if "norm" in name}
    assert len(norms) == 2 * (4 + 2) * 2 + 2
    assert norms <= groups["not decayed"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qk_norm": "rmsnorm"}, "qk_norm: rmsnorm needs use_qk_layernorm: true"),
        ({"qk_layernorm_over_heads": True}, "qk_layernorm_over_heads: true needs use_qk_layernorm: true"),
        ({"norm_placement": "post", "gpt_j_residual": True}, "norm_placement post needs serial branches"),
        ({"hidden_size": 30}, "hidden_size 30 is not divisible by num_attention_heads 4"),
        ({"attn_logit_softcapping": 50.0, "attention_backend": "sdpa", "pos_emb": "rotary"},
         "attention_backend 'sdpa': it cannot cap the scores .attn_logit_softcapping.; choose from auto, "),
        ({"attn_logit_softcapping": 50.0, "attention_backend": "native", "pos_emb": "alibi", "processor": "cdape"},
         "attention_backend 'native': it cannot cap the scores"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_rejected(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        built(**keys)
