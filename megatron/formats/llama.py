"""The Llama family as transformers has it: Llama 2 and 3, SmolLM2, and Qwen2, whose queries, keys and values alone have
biases."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.formats import rope
from megatron.formats.family import EMBEDDING, OUTPUT, Family, Weight, layers, same_biases
from megatron.formats.keys import Keys, activation
from megatron.formats.transforms import Interleaved, Joined, Same, Transform
from megatron.options.model import ffn_hidden_size, has_qkv_bias, intermediate_size_of, num_kv_heads

THEIR_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
"""Of our gated activations, and theirs of the gate."""


def _shared(keys: Keys) -> dict[str, Any]:
    width, heads = keys.number("hidden_size", 4096), keys.number("num_attention_heads", 32)
    gate = activation(keys, "hidden_act", "silu")
    gated = {"silu": "swiglu", "gelu": "geglu"}
    if gate not in gated:
        raise keys.refuse("hidden_act", "gates are silu or gelu")
    if keys.number("head_dim", width // heads) * heads != width:
        raise keys.refuse("head_dim", f"heads have hidden_size / num_attention_heads = {width // heads} dimensions")
    groups = keys.number("num_key_value_heads", heads)
    return {
        "num_layers": keys.number("num_hidden_layers", 32),
        "hidden_size": width,
        "num_attention_heads": heads,
        **({} if groups == heads else {"num_kv_heads": groups}),
        "intermediate_size": intermediate_size_of(keys.number("intermediate_size"), gated[gate]),
        "seq_length": keys.number("max_position_embeddings", 2048),
        "norm": "rmsnorm",
        "rms_norm_epsilon": keys.real("rms_norm_eps", 1e-6),
        "activation": gated[gate],
        "no_weight_tying": not keys.switch("tie_word_embeddings", False),
        "pos_emb": "rotary",
        "pos_emb_options": rope.read(keys, base="rope_theta", fraction=None, whole=1.0),
    }


def _llama(keys: Keys) -> dict[str, Any]:
    keys.get("pretraining_tp")  # how a product is split up, not what it is
    keys.only("rope_interleaved", (None, False), "pairs lie in two halves")
    return {
        **_shared(keys),
        "use_bias_in_attn_linear": keys.switch("attention_bias", False),
        "use_bias_in_mlp": keys.switch("mlp_bias", False),
    }


def _qwen2(keys: Keys) -> dict[str, Any]:
    keys.only("use_sliding_window", (None, False), "every layer attends to all earlier tokens")
    for name in ("sliding_window", "max_window_layers"):
        keys.get(name)  # of what is off
    kinds = keys.get("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        raise keys.refuse("layer_types", "every layer attends to all earlier tokens")
    return {
        **_shared(keys),
        "use_bias_in_attn_linear": False,
        "use_bias_in_qkv": True,
        "use_bias_in_mlp": False,
    }


def _needs(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("rotary",),
        "norm": ("rmsnorm",),
        "activation": tuple(THEIR_ACTIVATIONS),
        "gpt_j_residual": (False,),
    }


def _whole_heads(config: Config) -> str | None:
    share = config.position.pos_emb_options.get("fraction", 1.0)
    return None if share == 1 else f"pos_emb_options.fraction is {share}; this family turns whole heads"


def _llama_also(config: Config) -> str | None:
    return _whole_heads(config) or same_biases(config)


def _qwen2_also(config: Config) -> str | None:
    model = config.model
    if not has_qkv_bias(model) or model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        return "Qwen2ForCausalLM has biases in queries, keys and values, and nowhere else"
    return _whole_heads(config)


def _keys(config: Config) -> dict[str, Any]:
    model, options = config.model, config.position.pos_emb_options
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": model.hidden_size // model.num_attention_heads,
        "intermediate_size": ffn_hidden_size(model),
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.rms_norm_epsilon,
        "hidden_act": THEIR_ACTIVATIONS[model.activation],
        "rope_theta": options.get("base", 10000.0),
        **rope.written(options, fraction=False),
    }


def _llama_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear, "mlp_bias": config.model.use_bias_in_mlp}
    return {**_keys(config), **biases}


def _weights(config: Config) -> Iterator[Weight]:
    model = config.model
    qkv = Interleaved(model.num_attention_heads, num_kv_heads(model))

    def layer(number: str) -> Iterator[tuple[str, Any, Transform]]:
        theirs = f"model.layers.{number}"
        yield "input_layernorm.weight", f"{theirs}.input_layernorm.weight", Same()
        yield "pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", Same()
        for part, in_qkv, in_attention, in_mlp in (
            ("weight", True, True, True),
            ("bias", has_qkv_bias(model), model.use_bias_in_attn_linear, model.use_bias_in_mlp),
        ):
            if in_qkv:
                names = [f"{theirs}.self_attn.{each}_proj.{part}" for each in "qkv"]
                yield f"self_attention.linear_qkv.{part}", names, qkv
            if in_attention:
                yield f"self_attention.linear_proj.{part}", f"{theirs}.self_attn.o_proj.{part}", Same()
            if in_mlp:
                names = [f"{theirs}.mlp.{each}_proj.{part}" for each in ("gate", "up")]
                yield f"mlp.linear_fc1.{part}", names, Joined(2)
                yield f"mlp.linear_fc2.{part}", f"{theirs}.mlp.down_proj.{part}", Same()

    yield Weight(EMBEDDING, ("model.embed_tokens.weight",))
    yield from layers(config, layer)
    yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",))
    if model.no_weight_tying:
        yield Weight(OUTPUT, ("lm_head.weight",))


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    read=_llama,
    needs=_needs,
    keys=_llama_keys,
    drifts=rope.DRIFTS,
    weights=_weights,
    ignored=r".*\brotary_emb\.inv_freq",
    also=_llama_also,
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    base="model.",
    read=_qwen2,
    needs=_needs,
    keys=lambda config: {**_keys(config), "use_sliding_window": False},
    drifts=rope.DRIFTS,
    weights=_weights,
    also=_qwen2_also,
)
