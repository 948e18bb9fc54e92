"""OPT in transformers' format. Positions start at the third row of their table."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader, read_activation
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    OUTPUT_WEIGHT,
    Identity,
    ModelFamily,
    SeparateQKV,
    SkipRows,
    Transform,
    WeightMapping,
    check_equal_biases,
    has_grouped_queries,
    map_layers,
)
from megatron.options.model import get_ffn_hidden_size

ACTIVATION_TO_HF = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
POSITION_OFFSET = 2


def _from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    config_reader.require_one_of(
        "do_layer_norm_before", (None, True), "norms must precede attention and the feed-forward layer"
    )
    config_reader.require_one_of("_remove_final_layer_norm", (None, False), "a norm after the last layer is required")
    config_reader.require_one_of("layer_norm_elementwise_affine", (None, True), "norms must have weights")
    config_reader.get("init_std")
    hidden_size = config_reader.get_positive_int("hidden_size", 768)
    config_reader.require_one_of(
        "word_embed_proj_dim", (None, hidden_size), f"embeddings must have the width of the model, {hidden_size}"
    )
    has_bias, seq_length = (
        config_reader.get_bool("enable_bias", True),
        config_reader.get_positive_int("max_position_embeddings", 2048),
    )
    return {
        "num_layers": config_reader.get_positive_int("num_hidden_layers", 12),
        "hidden_size": hidden_size,
        "num_attention_heads": config_reader.get_positive_int("num_attention_heads", 12),
        "intermediate_size": config_reader.get_positive_int("ffn_dim", 3072),
        "seq_length": seq_length,
        "max_position_embeddings": seq_length,
        "norm": "layernorm",
        "activation": read_activation(config_reader, "activation_function", "relu"),
        "no_weight_tying": not config_reader.get_bool("tie_word_embeddings", True),
        "use_bias_in_attn_linear": has_bias,
        "use_bias_in_mlp": has_bias,
        "pos_emb": "learned",
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("learned",),
        "norm": ("layernorm",),
        "layernorm_epsilon": (1e-5,),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_residual": (False,),
        "use_bias_in_mlp": (config.model.use_bias_in_attn_linear,),
    }


def _find_other_conflict(config: Config) -> str | None:
    if has_grouped_queries(config):
        return f"num_kv_heads is {config.model.num_kv_heads}; OPTForCausalLM needs keys and values for every head"
    return check_equal_biases(config)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "word_embed_proj_dim": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_dim": get_ffn_hidden_size(model),
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "do_layer_norm_before": True,
        "activation_function": ACTIVATION_TO_HF[model.activation],
        "enable_bias": model.use_bias_in_attn_linear,
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    model = config.model
    num_heads = model.num_attention_heads
    parts = ("weight", "bias") if model.use_bias_in_mlp else ("weight",)

    def layer_table(layer_idx: str) -> Iterator[tuple[str, Any, Transform]]:
        hf_prefix = f"model.decoder.layers.{layer_idx}"
        for megatron_name, hf_name in (
            ("input_layernorm", "self_attn_layer_norm"),
            ("pre_mlp_layernorm", "final_layer_norm"),
        ):
            for part in ("weight", "bias"):
                yield f"{megatron_name}.{part}", f"{hf_prefix}.{hf_name}.{part}", Identity()
        for part in parts:
            hf_names = [f"{hf_prefix}.self_attn.{projection}_proj.{part}" for projection in "qkv"]
            yield f"self_attention.linear_qkv.{part}", hf_names, SeparateQKV(num_heads, num_heads)
            yield f"self_attention.linear_proj.{part}", f"{hf_prefix}.self_attn.out_proj.{part}", Identity()
            yield f"mlp.linear_fc1.{part}", f"{hf_prefix}.fc1.{part}", Identity()
            yield f"mlp.linear_fc2.{part}", f"{hf_prefix}.fc2.{part}", Identity()

    yield WeightMapping(EMBEDDING_WEIGHT, ("model.decoder.embed_tokens.weight",))
    yield WeightMapping("position.vectors.weight", ("model.decoder.embed_positions.weight",), SkipRows(POSITION_OFFSET))
    yield from map_layers(config, layer_table)
    for part in ("weight", "bias"):
        yield WeightMapping(f"decoder.final_layernorm.{part}", (f"model.decoder.final_layer_norm.{part}",))
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


OPT = ModelFamily(
    model_type="opt",
    architecture="OPTForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    weight_mappings=_weight_mappings,
    find_other_conflict=_find_other_conflict,
)
