"""This project's own exports, whose code travels with them: every model of ours, exactly.

A weight is the same bytes here and there; only names differ. `megatron/conversion/bundled/configuration_farfield.py`
explains the keys.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, get_args

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.model_family import (
    COMMON_SUPPORTED_VALUES,
    EMBEDDING_WEIGHT,
    IDENTITY,
    OUTPUT_WEIGHT,
    ModelFamily,
    Transform,
    WeightMapping,
    map_layers,
    map_linear_layers,
)
from megatron.model.mup import Multipliers, get_multipliers
from megatron.options.model import ModelOptions, ffn_hidden_size, has_qkv_bias, intermediate_size_of, num_kv_heads

AUTO_MAP = {
    "AutoConfig": "configuration_farfield.FarfieldConfig",
    "AutoModel": "modeling_farfield.FarfieldModel",
    "AutoModelForCausalLM": "modeling_farfield.FarfieldForCausalLM",
}
MUP_KEYS = tuple(name for name in ModelOptions.model_fields if name.startswith("mup_") and name != "mup_init_scale")
CHECKSUMS_FILE = "checksums.json"
"""In an export's folder: sizes and checksums of the files of weights, as of a checkpoint (`checkpoint/manifest.py`)."""

TOKENIZER_TYPE_KEY = "farfield_tokenizer"
"""In an export's tokenizer_config.json: our name of the kind of tokenizer."""


def _from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    norm = _read_choice(hf_config, "norm", "layernorm")
    epsilon_key = "layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon"
    num_heads = hf_config.get_positive_int("num_attention_heads")
    num_kv_heads = hf_config.get_positive_int("num_key_value_heads", num_heads)
    train_length = hf_config.get_positive_int("train_length")
    hf_config.get("max_position_embeddings")  # the training length again, for other programs
    activation = _read_choice(hf_config, "hidden_act", "gelu", field="activation")
    attention_bias, qkv_bias = hf_config.get_bool("attention_bias", True), hf_config.get_bool("qkv_bias", True)
    return {
        "num_layers": hf_config.get_positive_int("num_hidden_layers"),
        "hidden_size": hf_config.get_positive_int("hidden_size"),
        "num_attention_heads": num_heads,
        **({} if num_kv_heads == num_heads else {"num_kv_heads": num_kv_heads}),
        "intermediate_size": intermediate_size_of(hf_config.get_positive_int("intermediate_size"), activation),
        "seq_length": train_length,
        "max_position_embeddings": hf_config.get_positive_int("position_table", train_length),
        "norm": norm,
        epsilon_key: hf_config.get_positive_float("norm_epsilon", 1e-5),
        "activation": activation,
        "gpt_j_residual": hf_config.get_bool("parallel_residual", False),
        "gpt_j_tied": hf_config.get_bool("tied_norm", False),
        "no_weight_tying": not hf_config.get_bool("tie_word_embeddings", True),
        "use_bias_in_attn_linear": attention_bias,
        **({} if qkv_bias == attention_bias else {"use_bias_in_qkv": qkv_bias}),
        "use_bias_in_mlp": hf_config.get_bool("mlp_bias", True),
        "attention_chunk_rows": hf_config.get_positive_int("attention_rows", 128),
        "pos_emb": hf_config.get("pos_emb", "none"),
        "pos_emb_options": hf_config.get("pos_emb_options", {}),
        "pos_emb_per_layer": hf_config.get_bool("pos_emb_per_layer", False),
        "score_processor": hf_config.get("score_processor", "none"),
        "score_processor_options": hf_config.get("score_processor_options", {}),
        "attention_window": hf_config.get("attention_window"),
        "randomized_positions": hf_config.get("randomized_positions"),
        **_read_multipliers(hf_config),
    }


def _read_choice(hf_config: HFConfigReader, name: str, default: str, field: str | None = None) -> str:
    """A value of ours, under its own name or another."""
    value = hf_config.get(name, default)
    choices = get_args(ModelOptions.model_fields[field or name].annotation)
    if value not in choices:
        raise hf_config.value_error(name, f"choose from {', '.join(choices)}")
    return value


def _to_hf_keys(config: Config) -> dict[str, Any]:
    model, position = config.model, config.position
    return {
        "auto_map": AUTO_MAP,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": num_kv_heads(model),
        "intermediate_size": ffn_hidden_size(model),
        "hidden_act": model.activation,
        "norm": model.norm,
        "norm_epsilon": model.layernorm_epsilon if model.norm == "layernorm" else model.rms_norm_epsilon,
        "parallel_residual": model.gpt_j_residual,
        "tied_norm": model.gpt_j_tied,
        "qkv_bias": has_qkv_bias(model),
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
        "train_length": model.seq_length,
        "max_position_embeddings": model.seq_length,
        "position_table": model.max_position_embeddings or model.seq_length,
        "pos_emb": position.pos_emb,
        "pos_emb_options": position.pos_emb_options,
        "pos_emb_per_layer": position.pos_emb_per_layer,
        "score_processor": position.score_processor,
        "score_processor_options": position.score_processor_options,
        "attention_window": position.attention_window,
        "randomized_positions": position.randomized_positions,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "attention_rows": model.attention_chunk_rows,
        "initializer_range": model.init_method_std,
        **_write_multipliers(model),
    }


def _write_multipliers(model: ModelOptions) -> dict[str, Any]:
    """muP's factors, and our keys from which they follow; nothing without muP."""
    if not model.use_mup:
        return {}
    factors = {f"{name}_multiplier": factor for name, factor in asdict(get_multipliers(model)).items()}
    return {**factors, "mup": {key: getattr(model, key) for key in MUP_KEYS}}


def _read_multipliers(hf_config: HFConfigReader) -> dict[str, Any]:
    for name in asdict(Multipliers()):
        hf_config.get(f"{name}_multiplier")  # follow from the keys
    keys = hf_config.get("mup", None)
    if keys is None:
        return {}
    if not isinstance(keys, dict) or set(keys) - set(MUP_KEYS):
        raise hf_config.value_error("mup", f"it has the keys {', '.join(MUP_KEYS)}")
    return {"use_mup": True, **keys}


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    model = config.model
    encoding_parameters, processor_parameters = _list_position_parameters(config)
    norm_parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)

    def layer_table(layer_idx: str) -> Iterator[tuple[str, str, Transform]]:
        hf_prefix = f"model.layers.{layer_idx}"
        for megatron_name, name in (("input_layernorm", "attention_norm"), ("pre_mlp_layernorm", "mlp_norm")):
            for part in norm_parts if megatron_name == "input_layernorm" or not model.gpt_j_tied else ():
                yield f"{megatron_name}.{part}", f"{hf_prefix}.{name}.{part}", IDENTITY
        hf_names = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        yield from map_linear_layers(config, hf_prefix, hf_names, mlp_bias=model.use_bias_in_mlp)
        attention_prefix = "self_attention.core_attention"
        for name in encoding_parameters if config.position.pos_emb_per_layer else ():
            yield f"{attention_prefix}.position.{name}", f"{hf_prefix}.attention.encoding.{name}", IDENTITY
        for name in processor_parameters:
            yield f"{attention_prefix}.processor.{name}", f"{hf_prefix}.attention.processor.{name}", IDENTITY

    yield WeightMapping(EMBEDDING_WEIGHT, ("model.embed.weight",))
    for name in () if config.position.pos_emb_per_layer else encoding_parameters:
        yield WeightMapping(f"position.{name}", (f"model.position.{name}",))
    yield from map_layers(config, layer_table)
    for part in norm_parts:
        yield WeightMapping(f"decoder.final_layernorm.{part}", (f"model.norm.{part}",))
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


def _list_position_parameters(config: Config) -> tuple[list[str], list[str]]:
    """The names of the parameters of an encoding and of a processor."""
    import torch

    from megatron.model.position_modules import (
        build_attention_dims,
        build_encoding_from_options,
        build_processor_from_options,
    )

    with torch.device("meta"):
        dims = build_attention_dims(config.model)
        encoding = build_encoding_from_options(config.position, dims)
        processor = build_processor_from_options(config.position, dims, encoding)
    encoding_parameters = [name for name, _ in encoding.named_parameters()]
    return encoding_parameters, [] if processor is None else [name for name, _ in processor.named_parameters()]


FARFIELD = ModelFamily(
    model_type="farfield",
    architecture="FarfieldForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_from_hf_config,
    supported_values=lambda config: {
        key: (getattr(config.position, key),) for key in COMMON_SUPPORTED_VALUES
    },  # whatever there is
    to_hf_keys=_to_hf_keys,
    weight_mappings=_weight_mappings,
    auto_map=AUTO_MAP,
    multipliers=tuple(asdict(Multipliers())),
)
