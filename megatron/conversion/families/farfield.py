"""Exports in the project's own format, which include their code and represent every model exactly.

Weights are identical in both formats; only names differ. `megatron/conversion/bundled/configuration_farfield.py`
documents the keys.
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
from megatron.model.position_modules import list_layer_positions
from megatron.options.model import (
    ModelOptions,
    compute_intermediate_size,
    get_ffn_hidden_size,
    get_head_dim,
    get_norm_epsilon,
    get_num_kv_heads,
    get_qk_norm,
    has_qkv_bias,
    list_norm_parameters,
)
from megatron.options.position import PositionOptions
from megatron.position.catalog import read_encoding_facts

AUTO_MAP = {
    "AutoConfig": "configuration_farfield.FarfieldConfig",
    "AutoModel": "modeling_farfield.FarfieldModel",
    "AutoModelForCausalLM": "modeling_farfield.FarfieldForCausalLM",
}
MUP_KEYS = tuple(name for name in ModelOptions.model_fields if name.startswith("mup_") and name != "mup_init_scale")
CHECKSUMS_FILE = "checksums.json"
"""File in an export with sizes and checksums of the weight files, in the format of `checkpoint/manifest.py`."""

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_TYPE_KEY = "farfield_tokenizer"
"""Key in an export's tokenizer_config.json for this project's name of the tokenizer type."""
ADD_BOS_KEY = "farfield_add_bos_token"
"""Key in the same file that repeats add_bos_token, which transformers 5 omits when it saves a tokenizer."""


def _from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    norm = _read_choice(config_reader, "norm", "layernorm")
    epsilon_key = "layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon"
    hidden_size, num_heads = (config_reader.get_positive_int(name) for name in ("hidden_size", "num_attention_heads"))
    size = config_reader.get_positive_int("head_dim", max(hidden_size // num_heads, 1))
    num_kv_heads = config_reader.get_positive_int("num_key_value_heads", num_heads)
    train_length = config_reader.get_positive_int("train_length")
    config_reader.get("max_position_embeddings")  # follows from the encoding and its table
    activation = _read_choice(config_reader, "hidden_act", "gelu", field="activation")
    attention_bias, qkv_bias = config_reader.get_bool("attention_bias", True), config_reader.get_bool("qkv_bias", True)
    return {
        "num_layers": config_reader.get_positive_int("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        **({} if num_kv_heads == num_heads else {"num_kv_heads": num_kv_heads}),
        "intermediate_size": compute_intermediate_size(config_reader.get_positive_int("intermediate_size"), activation),
        "seq_length": train_length,
        "max_position_embeddings": config_reader.get_positive_int("position_table", train_length),
        "norm": norm,
        epsilon_key: config_reader.get_positive_float("norm_epsilon", 1e-5),
        "layernorm_bias": config_reader.get_bool("norm_bias", True),
        "norm_placement": _read_choice(config_reader, "norm_placement", "pre"),
        **_read_qk_norm(config_reader),
        **({} if size == hidden_size // num_heads and hidden_size % num_heads == 0 else {"head_dim": size}),
        "attn_logit_softcapping": _read_optional_float(config_reader, "attn_logit_softcapping"),
        "final_logit_softcapping": _read_optional_float(config_reader, "final_logit_softcapping"),
        "activation": activation,
        "gpt_j_residual": config_reader.get_bool("parallel_residual", False),
        "gpt_j_tied": config_reader.get_bool("tied_norm", False),
        "no_weight_tying": not config_reader.get_bool("tie_word_embeddings", True),
        "use_bias_in_attn_linear": attention_bias,
        **({} if qkv_bias == attention_bias else {"use_bias_in_qkv": qkv_bias}),
        "use_bias_in_mlp": config_reader.get_bool("mlp_bias", True),
        "attention_chunk_rows": config_reader.get_positive_int("attention_rows", 128),
        "pos_emb": config_reader.get("pos_emb", "none"),
        "pos_emb_options": _read_encoding_options(
            config_reader.get("pos_emb", "none"), config_reader.get("pos_emb_options", {})
        ),
        "pos_emb_per_layer": config_reader.get_bool("pos_emb_per_layer", False),
        "score_processor": config_reader.get("score_processor", "none"),
        "score_processor_options": _join_options(
            config_reader.get("score_processor", "none"), config_reader.get("score_processor_options", {})
        ),
        "attention_temperature": config_reader.get("attention_temperature", "none"),
        "attention_temperature_options": _join_options(
            config_reader.get("attention_temperature", "none"), config_reader.get("attention_temperature_options", {})
        ),
        "attention_window": config_reader.get("attention_window"),
        **({} if config_reader.get("document_end_token_id") is None else {"attention_mask": "document"}),
        "softmax_type": config_reader.get("softmax_type", "vanilla"),
        "attention_output_gate": config_reader.get("attention_output_gate", False),
        "randomized_positions": config_reader.get("randomized_positions"),
        "continuous_positions": config_reader.get("continuous_positions", False),
        **_read_multipliers(config_reader),
    }


def _split_options(config: Config, key: str) -> dict[str, Any]:
    """Return the options of the model's encoding or processor; for a pattern of layers, by method name."""
    if not isinstance(getattr(config.position, key), list):
        return getattr(config.position, f"{key}_options")
    layers = list_layer_positions(config.position, config.model.num_layers)
    return {getattr(own, key): getattr(own, f"{key}_options") for own in layers}


def _join_options(names: Any, options: Any) -> Any:
    """Merge the options split by `_split_options`; an option has the same value in all methods that have it."""
    if not isinstance(names, list):
        return options
    return {option: value for own in options.values() for option, value in own.items()}


def _write_encoding_options(config: Config) -> dict[str, Any]:
    """Return the options of the encoding, for a pattern by name. The option `scaled` of cope is always included."""
    options = _split_options(config, "pos_emb")
    if config.position.pos_emb == "cope":
        return {"scaled": False} | options
    if "cope" in config.position.encodings:
        return options | {"cope": {"scaled": False} | options["cope"]}
    return options


def _read_encoding_options(names: Any, options: Any) -> Any:
    """Invert `_write_encoding_options`. Exports without `scaled` were written when cope was always scaled."""
    joined = _join_options(names, options)
    if "cope" not in (names if isinstance(names, list) else [names]) or not isinstance(joined, dict):
        return joined
    scaled = joined.get("scaled", True)
    return {name: value for name, value in joined.items() if name != "scaled"} | ({"scaled": scaled} if scaled else {})


def _read_qk_norm(config_reader: HFConfigReader) -> dict[str, Any]:
    """Return the keys for the norm of queries and keys; its epsilon applies to all norms of its type."""
    kind, over_heads = config_reader.get("qk_norm", "none"), config_reader.get_bool("qk_norm_over_heads", False)
    epsilon = config_reader.get_positive_float("qk_norm_epsilon", 1e-5)
    if kind == "none":
        return {}
    if kind not in ("layernorm", "rmsnorm"):
        raise config_reader.value_error("qk_norm", "choose from none, layernorm, rmsnorm")
    epsilon_key = "layernorm_epsilon" if kind == "layernorm" else "rms_norm_epsilon"
    keys = {"use_qk_layernorm": True, "qk_norm": kind, epsilon_key: epsilon}
    return keys | ({"qk_layernorm_over_heads": True} if over_heads else {})


def _read_optional_float(config_reader: HFConfigReader, name: str) -> float | None:
    return None if config_reader.get(name) is None else config_reader.get_positive_float(name, 1.0)


def _read_choice(config_reader: HFConfigReader, name: str, default: str, field: str | None = None) -> str:
    """Return the value of a choice key, named `name` in config.json and `field` in our options."""
    value = config_reader.get(name, default)
    choices = get_args(ModelOptions.model_fields[field or name].annotation)
    if value not in choices:
        raise config_reader.value_error(name, f"choose from {', '.join(choices)}")
    return value


def find_longest_input(config: Config) -> int | None:
    """Return the number of tokens that a model's positions suffice for, or None if it accepts inputs of any length."""
    model, position = config.model, config.position
    limits = [] if position.randomized_positions is None else [position.randomized_positions]
    if any(read_encoding_facts(name).has_position_table for name in position.encodings):
        limits.append(model.max_position_embeddings or model.seq_length)
    return min(limits, default=None)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    model, position, kind = config.model, config.position, get_qk_norm(config.model)
    return {
        "auto_map": AUTO_MAP,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": get_num_kv_heads(model),
        "intermediate_size": get_ffn_hidden_size(model),
        "hidden_act": model.activation,
        "norm": model.norm,
        "head_dim": get_head_dim(model),
        "norm_epsilon": get_norm_epsilon(model, model.norm),
        "norm_bias": model.layernorm_bias,
        "norm_placement": model.norm_placement,
        "qk_norm": kind or "none",
        "qk_norm_epsilon": get_norm_epsilon(model, kind or model.norm),
        "qk_norm_over_heads": model.qk_layernorm_over_heads,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "parallel_residual": model.gpt_j_residual,
        "tied_norm": model.gpt_j_tied,
        "qkv_bias": has_qkv_bias(model),
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
        "train_length": model.seq_length,
        "max_position_embeddings": find_longest_input(config),
        "position_table": model.max_position_embeddings or model.seq_length,
        "pos_emb": position.pos_emb,
        "pos_emb_options": _write_encoding_options(config),
        "pos_emb_per_layer": position.pos_emb_per_layer,
        "score_processor": position.score_processor,
        "score_processor_options": _split_options(config, "score_processor"),
        "attention_temperature": position.attention_temperature,
        "attention_temperature_options": _split_options(config, "attention_temperature"),
        "attention_window": position.attention_window,
        "softmax_type": position.softmax_type,
        "attention_output_gate": model.attention_output_gate,
        "randomized_positions": position.randomized_positions,
        "continuous_positions": position.continuous_positions,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "attention_rows": model.attention_chunk_rows,
        "initializer_range": model.init_method_std,
        **_write_multipliers(model),
    }


def _write_multipliers(model: ModelOptions) -> dict[str, Any]:
    """Return the multipliers of the forward pass that are not 1, and our keys that determine them."""
    multipliers = asdict(get_multipliers(model)).items()
    factors: dict[str, Any] = {f"{name}_multiplier": factor for name, factor in multipliers if factor != 1.0}
    if model.query_pre_attn_scalar is not None:
        factors["query_pre_attn_scalar"] = model.query_pre_attn_scalar
    return {**factors, "mup": {key: getattr(model, key) for key in MUP_KEYS}} if model.use_mup else factors


def _read_multipliers(config_reader: HFConfigReader) -> dict[str, Any]:
    for name in asdict(Multipliers()):
        config_reader.get(f"{name}_multiplier")  # computed from the other keys
    scalar, keys = _read_optional_float(config_reader, "query_pre_attn_scalar"), config_reader.get("mup", None)
    if keys is None:
        embedding = config_reader.get_positive_float("embedding_multiplier", 1.0)
        residual = config_reader.get_positive_float("residual_multiplier", 1.0)
        logits = config_reader.get_positive_float("logits_multiplier", 1.0)
        return {
            "embedding_multiplier": embedding,
            "query_pre_attn_scalar": scalar,
            "residual_multiplier": residual,
            "logit_scale": logits,
        }
    if not isinstance(keys, dict) or set(keys) - set(MUP_KEYS):
        raise config_reader.value_error("mup", f"it must have the keys {', '.join(MUP_KEYS)}")
    return {"use_mup": True, **keys}


def _list_layer_norms(model: ModelOptions) -> Iterator[tuple[str, str]]:
    """Yield our names of a layer's norms, and those in the export."""
    if model.norm_placement != "post":
        yield "input_layernorm", "attention_norm"
        if not model.gpt_j_tied:
            yield "pre_mlp_layernorm", "mlp_norm"
    if model.norm_placement != "pre":
        yield "post_self_attn_layernorm", "attention_post_norm"
        yield "post_mlp_layernorm", "mlp_post_norm"


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    model = config.model
    layers = list_layer_positions(config.position, model.num_layers)
    kinds = {id(own): own for own in layers}  # identical layers are one object
    parameters = {key: _list_position_parameters(config, own) for key, own in kinds.items()}
    norm_parts, qk_norm_parts = (list_norm_parameters(model, kind) for kind in (model.norm, get_qk_norm(model)))

    def layer_table(layer_idx: str) -> Iterator[tuple[str, str, Transform]]:
        hf_prefix = f"model.layers.{layer_idx}"
        for megatron_name, name in _list_layer_norms(model):
            for part in norm_parts:
                yield f"{megatron_name}.{part}", f"{hf_prefix}.{name}.{part}", IDENTITY
        for part in qk_norm_parts:
            for which in "qk":
                megatron_name = f"self_attention.{which}_layernorm.{part}"
                yield megatron_name, f"{hf_prefix}.attention.{which}_norm.{part}", IDENTITY
        hf_names = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        yield from map_linear_layers(config, hf_prefix, hf_names, mlp_bias=model.use_bias_in_mlp)
        if model.attention_output_gate:
            yield "self_attention.linear_gate.weight", f"{hf_prefix}.attention.output_gate.weight", IDENTITY
        attention_prefix = "self_attention.core_attention"
        encoding_parameters, processor_parameters, temperature_parameters = parameters[id(layers[int(layer_idx)])]
        for name in encoding_parameters if config.position.pos_emb_per_layer else ():
            yield f"{attention_prefix}.position.{name}", f"{hf_prefix}.attention.encoding.{name}", IDENTITY
        for name in processor_parameters:
            yield f"{attention_prefix}.processor.{name}", f"{hf_prefix}.attention.processor.{name}", IDENTITY
        if layers[int(layer_idx)].softmax == "learnable":
            yield f"{attention_prefix}.sink.logits", f"{hf_prefix}.attention.sink.logits", IDENTITY
        for name in temperature_parameters:
            yield f"{attention_prefix}.temperature.{name}", f"{hf_prefix}.attention.temperature.{name}", IDENTITY

    yield WeightMapping(EMBEDDING_WEIGHT, ("model.embed.weight",))
    shared = {} if config.position.pos_emb_per_layer else {own.encoding: parameters[id(own)][0] for own in layers}
    for encoding, names in shared.items():
        prefix = "position" if len(shared) == 1 else f"positions.{encoding}"
        for name in names:
            yield WeightMapping(f"{prefix}.{name}", (f"model.{prefix}.{name}",))
    yield from map_layers(config, layer_table)
    for part in norm_parts:
        yield WeightMapping(f"decoder.final_layernorm.{part}", (f"model.norm.{part}",))
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


def _list_position_parameters(config: Config, own: PositionOptions) -> tuple[list[str], list[str], list[str]]:
    """Return the parameter names of a layer's encoding, processor and temperature."""
    import torch

    from megatron.model.position_modules import (
        build_attention_dims,
        build_encoding_from_options,
        build_processor_from_options,
        build_temperature_from_options,
    )

    with torch.device("meta"):
        dims = build_attention_dims(config.model)
        encoding = build_encoding_from_options(own, dims)
        processor = build_processor_from_options(own, dims, encoding)
        temperature = build_temperature_from_options(own, dims)

    def list_names(module: torch.nn.Module | None) -> list[str]:
        return [] if module is None else [name for name, _ in module.named_parameters()]

    return list_names(encoding), list_names(processor), list_names(temperature)


def _find_other_conflict(config: Config) -> str | None:
    import torch

    from megatron.model.position_modules import (
        build_attention_dims,
        build_encoding_from_options,
        list_layer_types,
    )

    options = config.position.pos_emb_options
    unknown = "the cache in transformers does not know the final length of a text"
    with torch.device("meta"):
        dims = build_attention_dims(config.model)
        for own in list_layer_types(config.position, config.model.num_layers):
            if build_encoding_from_options(own, dims).depends_on_length:
                cause = f" (pos_emb_options.scaling is {scaling})" if (scaling := options.get("scaling")) else ""
                return f"pos_emb {own.encoding} depends on the length of the whole text{cause}; {unknown}"
    return (
        f"pos_emb_options.xpos is true, and its factors are relative to the middle of the text; {unknown}"
        if options.get("xpos")
        else None
    )


FARFIELD = ModelFamily(
    model_type="farfield",
    architecture="FarfieldForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_from_hf_config,
    supported_values=lambda config: {
        key: (value,)
        for section in (config.model, config.position)
        for key, value in section.model_dump().items()
        if key in COMMON_SUPPORTED_VALUES
    },  # all values are supported
    to_hf_keys=_to_hf_keys,
    weight_mappings=_weight_mappings,
    auto_map=AUTO_MAP,
    find_other_conflict=_find_other_conflict,
    multipliers=tuple(asdict(Multipliers())),
)
