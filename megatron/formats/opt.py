"""OPT as transformers has it. Its positions begin at the third row of their table."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.formats.family import EMBEDDING, OUTPUT, Family, Weight, grouped, layers, same_biases
from megatron.formats.keys import Keys, activation
from megatron.formats.transforms import Interleaved, Same, Skipping, Transform
from megatron.options.model import ffn_hidden_size

THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
UNREAD_ROWS = 2


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("do_layer_norm_before", (None, True), "norms stand before attention and the feed-forward layer")
    keys.only("_remove_final_layer_norm", (None, False), "there is a norm after the last layer")
    keys.only("layer_norm_elementwise_affine", (None, True), "norms have weights")
    keys.get("init_std")
    width = keys.number("hidden_size", 768)
    keys.only("word_embed_proj_dim", (None, width), f"embeddings have the width of the model, {width}")
    bias, length = keys.switch("enable_bias", True), keys.number("max_position_embeddings", 2048)
    return {
        "num_layers": keys.number("num_hidden_layers", 12),
        "hidden_size": width,
        "num_attention_heads": keys.number("num_attention_heads", 12),
        "intermediate_size": keys.number("ffn_dim", 3072),
        "seq_length": length,
        "max_position_embeddings": length,
        "norm": "layernorm",
        "activation": activation(keys, "activation_function", "relu"),
        "no_weight_tying": not keys.switch("tie_word_embeddings", True),
        "use_bias_in_attn_linear": bias,
        "use_bias_in_mlp": bias,
        "pos_emb": "learned",
    }


def _needs(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("learned",),
        "norm": ("layernorm",),
        "layernorm_epsilon": (1e-5,),
        "activation": tuple(THEIR_ACTIVATIONS),
        "gpt_j_residual": (False,),
        "use_bias_in_mlp": (config.model.use_bias_in_attn_linear,),
    }


def _also(config: Config) -> str | None:
    if grouped(config):
        return f"num_kv_heads is {config.model.num_kv_heads}; OPTForCausalLM has keys and values for every head"
    return same_biases(config)


def _keys(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "word_embed_proj_dim": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_dim": ffn_hidden_size(model),
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "do_layer_norm_before": True,
        "activation_function": THEIR_ACTIVATIONS[model.activation],
        "enable_bias": model.use_bias_in_attn_linear,
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _weights(config: Config) -> Iterator[Weight]:
    model = config.model
    heads = model.num_attention_heads
    parts = ("weight", "bias") if model.use_bias_in_mlp else ("weight",)

    def layer(number: str) -> Iterator[tuple[str, Any, Transform]]:
        theirs = f"model.decoder.layers.{number}"
        for ours, name in (("input_layernorm", "self_attn_layer_norm"), ("pre_mlp_layernorm", "final_layer_norm")):
            for part in ("weight", "bias"):
                yield f"{ours}.{part}", f"{theirs}.{name}.{part}", Same()
        for part in parts:
            names = [f"{theirs}.self_attn.{each}_proj.{part}" for each in "qkv"]
            yield f"self_attention.linear_qkv.{part}", names, Interleaved(heads, heads)
            yield f"self_attention.linear_proj.{part}", f"{theirs}.self_attn.out_proj.{part}", Same()
            yield f"mlp.linear_fc1.{part}", f"{theirs}.fc1.{part}", Same()
            yield f"mlp.linear_fc2.{part}", f"{theirs}.fc2.{part}", Same()

    yield Weight(EMBEDDING, ("model.decoder.embed_tokens.weight",))
    yield Weight("position.vectors.weight", ("model.decoder.embed_positions.weight",), Skipping(UNREAD_ROWS))
    yield from layers(config, layer)
    for part in ("weight", "bias"):
        yield Weight(f"decoder.final_layernorm.{part}", (f"model.decoder.final_layer_norm.{part}",))
    if model.no_weight_tying:
        yield Weight(OUTPUT, ("lm_head.weight",))


OPT = Family(
    name="opt",
    architecture="OPTForCausalLM",
    base="model.",
    read=_read,
    needs=_needs,
    keys=_keys,
    weights=_weights,
    also=_also,
)
