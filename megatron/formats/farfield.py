"""This project's own exports, whose code travels with them: every model of ours, exactly.

A weight is the same bytes here and there; only names differ. `megatron/export/bundled/configuration_farfield.py`
explains the keys.
"""

from collections.abc import Iterator
from typing import Any, get_args

from megatron.config.schema import Config
from megatron.formats.family import AS_IS, COMMON, EMBEDDING, OUTPUT, Family, Weight, layers, linears
from megatron.formats.keys import Keys
from megatron.formats.transforms import Transform
from megatron.options.model import ModelOptions, ffn_hidden_size, has_qkv_bias, intermediate_size_of, num_kv_heads

CODE = {
    "AutoConfig": "configuration_farfield.FarfieldConfig",
    "AutoModel": "modeling_farfield.FarfieldModel",
    "AutoModelForCausalLM": "modeling_farfield.FarfieldForCausalLM",
}
CHECKSUMS = "checksums.json"
"""In an export's folder: sizes and checksums of the files of weights, as of a checkpoint (`checkpoint/manifest.py`)."""

TOKENIZER_KIND = "farfield_tokenizer"
"""In an export's tokenizer_config.json: our name of the kind of tokenizer."""


def _read(keys: Keys) -> dict[str, Any]:
    norm = _choice(keys, "norm", "layernorm")
    epsilon = "layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon"
    heads = keys.number("num_attention_heads")
    groups = keys.number("num_key_value_heads", heads)
    length = keys.number("train_length")
    keys.get("max_position_embeddings")  # the training length again, for other programs
    activation = _choice(keys, "hidden_act", "gelu", of="activation")
    after, before = keys.switch("attention_bias", True), keys.switch("qkv_bias", True)
    return {
        "num_layers": keys.number("num_hidden_layers"),
        "hidden_size": keys.number("hidden_size"),
        "num_attention_heads": heads,
        **({} if groups == heads else {"num_kv_heads": groups}),
        "intermediate_size": intermediate_size_of(keys.number("intermediate_size"), activation),
        "seq_length": length,
        "max_position_embeddings": keys.number("position_table", length),
        "norm": norm,
        epsilon: keys.real("norm_epsilon", 1e-5),
        "activation": activation,
        "gpt_j_residual": keys.switch("parallel_residual", False),
        "gpt_j_tied": keys.switch("tied_norm", False),
        "no_weight_tying": not keys.switch("tie_word_embeddings", True),
        "use_bias_in_attn_linear": after,
        **({} if before == after else {"use_bias_in_qkv": before}),
        "use_bias_in_mlp": keys.switch("mlp_bias", True),
        "attention_chunk_rows": keys.number("attention_rows", 128),
        "pos_emb": keys.get("pos_emb", "none"),
        "pos_emb_options": keys.get("pos_emb_options", {}),
        "pos_emb_per_layer": keys.switch("pos_emb_per_layer", False),
        "score_processor": keys.get("score_processor", "none"),
        "score_processor_options": keys.get("score_processor_options", {}),
        "attention_window": keys.get("attention_window"),
        "randomized_positions": keys.get("randomized_positions"),
    }


def _choice(keys: Keys, name: str, default: str, of: str | None = None) -> str:
    """A value of ours, under its own name or another."""
    value = keys.get(name, default)
    choices = get_args(ModelOptions.model_fields[of or name].annotation)
    if value not in choices:
        raise keys.refuse(name, f"choose from {', '.join(choices)}")
    return value


def _keys(config: Config) -> dict[str, Any]:
    model, position = config.model, config.position
    return {
        "auto_map": CODE,
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
    }


def _weights(config: Config) -> Iterator[Weight]:
    model = config.model
    encoding, processor = _methods(config)
    norms = ("weight", "bias") if model.norm == "layernorm" else ("weight",)

    def layer(number: str) -> Iterator[tuple[str, str, Transform]]:
        theirs = f"model.layers.{number}"
        for ours, name in (("input_layernorm", "attention_norm"), ("pre_mlp_layernorm", "mlp_norm")):
            for part in norms if ours == "input_layernorm" or not model.gpt_j_tied else ():
                yield f"{ours}.{part}", f"{theirs}.{name}.{part}", AS_IS
        names = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        yield from linears(config, theirs, names, mlp_bias=model.use_bias_in_mlp)
        core = "self_attention.core_attention"
        for name in encoding if config.position.pos_emb_per_layer else ():
            yield f"{core}._own.{name}", f"{theirs}.attention.encoding.{name}", AS_IS
        for name in processor:
            yield f"{core}.processor.{name}", f"{theirs}.attention.processor.{name}", AS_IS

    yield Weight(EMBEDDING, ("model.embed.weight",))
    for name in () if config.position.pos_emb_per_layer else encoding:
        yield Weight(f"position.{name}", (f"model.position.{name}",))
    yield from layers(config, layer)
    for part in norms:
        yield Weight(f"decoder.final_layernorm.{part}", (f"model.norm.{part}",))
    if model.no_weight_tying:
        yield Weight(OUTPUT, ("lm_head.weight",))


def _methods(config: Config) -> tuple[list[str], list[str]]:
    """The names of the parameters of an encoding and of a processor."""
    import torch

    from megatron.model.methods import build_attention_dims, build_encoding_from_options, build_processor_from_options

    with torch.device("meta"):
        shape = build_attention_dims(config.model)
        encoding = build_encoding_from_options(config.position, shape)
        processor = build_processor_from_options(config.position, shape, encoding)
    names = [name for name, _ in encoding.named_parameters()]
    return names, [] if processor is None else [name for name, _ in processor.named_parameters()]


FARFIELD = Family(
    name="farfield",
    architecture="FarfieldForCausalLM",
    base="model.",
    read=_read,
    needs=lambda config: {key: (getattr(config.position, key),) for key in COMMON},  # whatever there is
    keys=_keys,
    weights=_weights,
    code=CODE,
)
