"""GPT-NeoX as transformers has it: Pythia, GPT-NeoX-20B, and what its own converter writes."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.formats import rope
from megatron.formats.family import AS_IS, EMBEDDING, OUTPUT, Family, Weight, grouped, layers, linears, same_biases
from megatron.formats.keys import Keys, activation
from megatron.formats.transforms import Transform
from megatron.options.model import ffn_hidden_size

THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}


def _read(keys: Keys) -> dict[str, Any]:
    attention = keys.switch("attention_bias", True)
    return {
        "num_layers": keys.number("num_hidden_layers"),
        "hidden_size": keys.number("hidden_size"),
        "num_attention_heads": keys.number("num_attention_heads"),
        "intermediate_size": keys.number("intermediate_size"),
        "seq_length": keys.number("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": keys.real("layer_norm_eps", 1e-5),
        "activation": activation(keys, "hidden_act", "gelu"),
        "gpt_j_residual": keys.switch("use_parallel_residual", True),
        "no_weight_tying": not keys.switch("tie_word_embeddings", False),
        "use_bias_in_attn_linear": attention,
        "use_bias_in_mlp": True,
        "pos_emb": "rotary",
        "pos_emb_options": rope.read(keys, base="rotary_emb_base", fraction="rotary_pct", whole=0.25),
    }


def _needs(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("rotary",),
        "norm": ("layernorm",),
        "activation": tuple(THEIR_ACTIVATIONS),
        "gpt_j_tied": (False,),
        "use_bias_in_mlp": (True,),
    }


def _also(config: Config) -> str | None:
    if grouped(config):
        return f"num_kv_heads is {config.model.num_kv_heads}; GPTNeoXForCausalLM has keys and values for every head"
    return same_biases(config)


def _keys(config: Config) -> dict[str, Any]:
    model, options = config.model, config.position.pos_emb_options
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": ffn_hidden_size(model),
        "max_position_embeddings": model.seq_length,
        "layer_norm_eps": model.layernorm_epsilon,
        "hidden_act": THEIR_ACTIVATIONS[model.activation],
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "rotary_pct": options.get("fraction", 1.0),
        "rotary_emb_base": options.get("base", 10000.0),
        **rope.written(options, fraction=True),
    }


def _weights(config: Config) -> Iterator[Weight]:
    model = config.model

    def layer(number: str) -> Iterator[tuple[str, str, Transform]]:
        theirs = f"gpt_neox.layers.{number}"
        for ours, name in (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm")):
            for part in ("weight", "bias"):
                yield f"{ours}.{part}", f"{theirs}.{name}.{part}", AS_IS
        names = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        yield from linears(config, theirs, names, mlp_bias=True)

    yield Weight(EMBEDDING, ("gpt_neox.embed_in.weight",))
    yield from layers(config, layer)
    for part in ("weight", "bias"):
        yield Weight(f"decoder.final_layernorm.{part}", (f"gpt_neox.final_layer_norm.{part}",))
    if model.no_weight_tying:
        yield Weight(OUTPUT, ("embed_out.weight",))


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base="gpt_neox.",
    read=_read,
    needs=_needs,
    keys=_keys,
    drifts=rope.DRIFTS,
    weights=_weights,
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*\brotary_emb\.inv_freq",
    synonyms={"embed_out.weight": "lm_head.weight"},
    also=_also,
)
