"""GPT-2 as transformers has it."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.formats.family import EMBEDDING, OUTPUT, Family, Weight, grouped, layers
from megatron.formats.keys import Keys, activation
from megatron.formats.transforms import Same, Stacked, Transform, Transposed
from megatron.options.model import ffn_hidden_size, has_qkv_bias

THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("scale_attn_weights", (None, True), "scores are always divided by the root of the head dimension")
    keys.only("scale_attn_by_inverse_layer_idx", (None, False), "scores are scaled alike in all layers")
    keys.get("reorder_and_upcast_attn")  # where a product is rounded, not what is computed
    width, length = keys.number("n_embd", 768), keys.number("n_positions", 1024)
    return {
        "num_layers": keys.number("n_layer", 12),
        "hidden_size": width,
        "num_attention_heads": keys.number("n_head", 12),
        "intermediate_size": keys.number("n_inner", 4 * width),
        "seq_length": length,
        "max_position_embeddings": length,
        "norm": "layernorm",
        "layernorm_epsilon": keys.real("layer_norm_epsilon", 1e-5),
        "activation": activation(keys, "activation_function", "gelu_new"),
        "no_weight_tying": not keys.switch("tie_word_embeddings", True),
        "pos_emb": "learned",
    }


def _needs(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("learned",),
        "norm": ("layernorm",),
        "activation": tuple(THEIR_ACTIVATIONS),
        "gpt_j_residual": (False,),
        "use_bias_in_attn_linear": (True,),
        "use_bias_in_mlp": (True,),
    }


def _also(config: Config) -> str | None:
    if grouped(config):
        return f"num_kv_heads is {config.model.num_kv_heads}; GPT2LMHeadModel has keys and values for every head"
    return None


def _keys(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": ffn_hidden_size(model),
        "n_positions": model.max_position_embeddings or model.seq_length,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "activation_function": THEIR_ACTIVATIONS[model.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": model.attention_dropout,
    }


def _weights(config: Config) -> Iterator[Weight]:
    heads = config.model.num_attention_heads
    assert has_qkv_bias(config.model)

    def layer(number: str) -> Iterator[tuple[str, str, Transform]]:
        theirs = f"transformer.h.{number}"
        for ours, name in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
            for part in ("weight", "bias"):
                yield f"{ours}.{part}", f"{theirs}.{name}.{part}", Same()
        yield "self_attention.linear_qkv.weight", f"{theirs}.attn.c_attn.weight", Stacked(heads, dim=1)
        yield "self_attention.linear_qkv.bias", f"{theirs}.attn.c_attn.bias", Stacked(heads)
        for ours, name in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            yield f"{ours}.weight", f"{theirs}.{name}.weight", Transposed()
            yield f"{ours}.bias", f"{theirs}.{name}.bias", Same()

    yield Weight(EMBEDDING, ("transformer.wte.weight",))
    yield Weight("position.vectors.weight", ("transformer.wpe.weight",))
    yield from layers(config, layer)
    for part in ("weight", "bias"):
        yield Weight(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",))
    if config.model.no_weight_tying:
        yield Weight(OUTPUT, ("lm_head.weight",))


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    read=_read,
    needs=_needs,
    keys=_keys,
    weights=_weights,
    ignored=r".*\.attn\.(bias|masked_bias)",
    also=_also,
)
