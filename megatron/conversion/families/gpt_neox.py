"""GPT-NeoX in transformers' format: Pythia, GPT-NeoX-20B, and the output of GPT-NeoX's own converter."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader, read_activation
from megatron.conversion.hf_layers import ROPE_DIFFERENCE, build_rope_keys, check_rope_scaling, read_rope_options
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    IDENTITY,
    OUTPUT_WEIGHT,
    ModelFamily,
    Transform,
    WeightMapping,
    check_equal_biases,
    has_grouped_queries,
    map_layers,
    map_linear_layers,
)
from megatron.options.model import get_ffn_hidden_size

ACTIVATION_TO_HF = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}


def _from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    attention_bias = config_reader.get_bool("attention_bias", True)
    return {
        "num_layers": config_reader.get_positive_int("num_hidden_layers"),
        "hidden_size": config_reader.get_positive_int("hidden_size"),
        "num_attention_heads": config_reader.get_positive_int("num_attention_heads"),
        "intermediate_size": config_reader.get_positive_int("intermediate_size"),
        "seq_length": config_reader.get_positive_int("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": config_reader.get_positive_float("layer_norm_eps", 1e-5),
        "activation": read_activation(config_reader, "hidden_act", "gelu"),
        "gpt_j_residual": config_reader.get_bool("use_parallel_residual", True),
        "no_weight_tying": not config_reader.get_bool("tie_word_embeddings", False),
        "use_bias_in_attn_linear": attention_bias,
        "use_bias_in_mlp": True,
        "pos_emb": "rotary",
        "pos_emb_options": read_rope_options(
            config_reader, base_key="rotary_emb_base", fraction_key="rotary_pct", default_fraction=0.25
        ),
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("rotary",),
        "norm": ("layernorm",),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_tied": (False,),
        "use_bias_in_mlp": (True,),
    }


def _find_other_conflict(config: Config) -> str | None:
    if has_grouped_queries(config):
        return f"num_kv_heads is {config.model.num_kv_heads}; GPTNeoXForCausalLM needs keys and values for every head"
    return check_rope_scaling(config.position.pos_emb_options) or check_equal_biases(config)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    model, options = config.model, config.position.pos_emb_options
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": get_ffn_hidden_size(model),
        "max_position_embeddings": model.seq_length,
        "layer_norm_eps": model.layernorm_epsilon,
        "hidden_act": ACTIVATION_TO_HF[model.activation],
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "rotary_pct": options.get("fraction", 1.0),
        "rotary_emb_base": options.get("base", 10000.0),
        **build_rope_keys(options, supports_fraction=True),
    }


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    model = config.model

    def layer_table(layer_idx: str) -> Iterator[tuple[str, str, Transform]]:
        hf_prefix = f"gpt_neox.layers.{layer_idx}"
        for megatron_name, hf_name in (
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        ):
            for part in ("weight", "bias"):
                yield f"{megatron_name}.{part}", f"{hf_prefix}.{hf_name}.{part}", IDENTITY
        hf_names = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        yield from map_linear_layers(config, hf_prefix, hf_names, mlp_bias=True)

    yield WeightMapping(EMBEDDING_WEIGHT, ("gpt_neox.embed_in.weight",))
    yield from map_layers(config, layer_table)
    for part in ("weight", "bias"):
        yield WeightMapping(f"decoder.final_layernorm.{part}", (f"gpt_neox.final_layer_norm.{part}",))
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("embed_out.weight",))


GPT_NEOX = ModelFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base_model_prefix="gpt_neox.",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=_weight_mappings,
    ignored_pattern=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*\brotary_emb\.inv_freq",
    tensor_aliases={"embed_out.weight": "lm_head.weight"},
    find_other_conflict=_find_other_conflict,
)
