"""GPT-2 in transformers' format."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader, read_activation
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    OUTPUT_WEIGHT,
    ConcatQKV,
    Identity,
    ModelFamily,
    Transform,
    Transpose,
    WeightMapping,
    has_grouped_queries,
    map_layers,
)
from megatron.options.model import get_ffn_hidden_size, has_qkv_bias

ACTIVATION_TO_HF = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def _from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    config_reader.require_one_of(
        "scale_attn_weights", (None, True), "scores are always divided by the square root of the head dimension"
    )
    config_reader.require_one_of(
        "scale_attn_by_inverse_layer_idx", (None, False), "scores are scaled equally in all layers"
    )
    config_reader.get("reorder_and_upcast_attn")  # affects rounding, not the result
    hidden_size, seq_length = (
        config_reader.get_positive_int("n_embd", 768),
        config_reader.get_positive_int("n_positions", 1024),
    )
    return {
        "num_layers": config_reader.get_positive_int("n_layer", 12),
        "hidden_size": hidden_size,
        "num_attention_heads": config_reader.get_positive_int("n_head", 12),
        "intermediate_size": config_reader.get_positive_int("n_inner", 4 * hidden_size),
        "seq_length": seq_length,
        "max_position_embeddings": seq_length,
        "norm": "layernorm",
        "layernorm_epsilon": config_reader.get_positive_float("layer_norm_epsilon", 1e-5),
        "activation": read_activation(config_reader, "activation_function", "gelu_new"),
        "no_weight_tying": not config_reader.get_bool("tie_word_embeddings", True),
        "pos_emb": "learned",
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("learned",),
        "norm": ("layernorm",),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_residual": (False,),
        "use_bias_in_attn_linear": (True,),
        "use_bias_in_mlp": (True,),
    }


def _find_other_conflict(config: Config) -> str | None:
    if has_grouped_queries(config):
        return f"num_kv_heads is {config.model.num_kv_heads}; GPT2LMHeadModel needs keys and values for every head"
    return None


def _to_hf_keys(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": get_ffn_hidden_size(model),
        "n_positions": model.max_position_embeddings or model.seq_length,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "activation_function": ACTIVATION_TO_HF[model.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": model.attention_dropout,
    }


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    num_heads = config.model.num_attention_heads
    assert has_qkv_bias(config.model)

    def layer_table(layer_idx: str) -> Iterator[tuple[str, str, Transform]]:
        hf_prefix = f"transformer.h.{layer_idx}"
        for megatron_name, hf_name in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
            for part in ("weight", "bias"):
                yield f"{megatron_name}.{part}", f"{hf_prefix}.{hf_name}.{part}", Identity()
        yield (
            "self_attention.linear_qkv.weight",
            f"{hf_prefix}.attn.c_attn.weight",
            ConcatQKV(num_heads, num_heads, head_dim_index=1),
        )
        yield "self_attention.linear_qkv.bias", f"{hf_prefix}.attn.c_attn.bias", ConcatQKV(num_heads, num_heads)
        for megatron_name, hf_name in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            yield f"{megatron_name}.weight", f"{hf_prefix}.{hf_name}.weight", Transpose()
            yield f"{megatron_name}.bias", f"{hf_prefix}.{hf_name}.bias", Identity()

    yield WeightMapping(EMBEDDING_WEIGHT, ("transformer.wte.weight",))
    yield WeightMapping("position.vectors.weight", ("transformer.wpe.weight",))
    yield from map_layers(config, layer_table)
    for part in ("weight", "bias"):
        yield WeightMapping(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",))
    if config.model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


GPT2 = ModelFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    base_model_prefix="transformer.",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    weight_mappings=_weight_mappings,
    ignored_pattern=r".*\.attn\.(bias|masked_bias)",
    find_other_conflict=_find_other_conflict,
)
