"""Conflicting values of a model, and sizes that ranks cannot divide."""

from collections.abc import Iterator
from math import gcd

from megatron.options.model import (
    DROPOUT_KEYS,
    GATED_ACTIVATIONS,
    GATED_RATIO,
    ModelOptions,
    ffn_hidden_size,
    has_qkv_bias,
    num_kv_heads,
    qk_norm,
)
from megatron.options.position import PositionOptions


def find_model_conflicts(model: ModelOptions, position: PositionOptions) -> Iterator[tuple[str, str]]:
    """Yield conflicting values: the key to blame, and one sentence with the values."""
    heads, width, length = model.num_attention_heads, model.hidden_size, model.seq_length
    if width % heads and model.head_dim is None:
        yield "num_attention_heads", f"hidden_size {width} is not divisible by num_attention_heads {heads}"
    if model.num_kv_heads is not None and heads % model.num_kv_heads:
        yield (
            "num_kv_heads",
            f"num_attention_heads {heads} is not divisible by num_kv_heads {model.num_kv_heads}; "
            f"use {_nearest_divisor(heads, model.num_kv_heads)}",
        )
    if model.use_bias_in_attn_linear and not has_qkv_bias(model):
        yield (
            "use_bias_in_qkv",
            "use_bias_in_qkv: false needs use_bias_in_attn_linear: false; a bias in the output projection alone is "
            "not supported",
        )
    if ffn_hidden_size(model) == 0:
        yield (
            "intermediate_size",
            f"intermediate_size {model.intermediate_size} leaves no width with activation {model.activation}, which "
            f"uses a third of it; it must be at least {GATED_RATIO}",
        )
    if model.gpt_j_tied and not model.gpt_j_residual:
        yield "gpt_j_tied", "gpt_j_tied: true needs gpt_j_residual: true"
    if model.norm_placement != "pre" and model.gpt_j_residual:
        yield (
            "norm_placement",
            f"norm_placement {model.norm_placement} needs serial branches; set gpt_j_residual to false",
        )
    for key in ("qk_norm", "qk_layernorm_over_heads"):
        if getattr(model, key) and not model.use_qk_layernorm:
            yield key, f"{key}: {_format_value(getattr(model, key))} needs use_qk_layernorm: true"
    if not model.layernorm_bias and "layernorm" not in (model.norm, qk_norm(model)):
        yield "layernorm_bias", "layernorm_bias: false needs layernorm; rmsnorm never has a bias"
    if model.checkpoint_num_layers > model.num_layers:
        yield (
            "checkpoint_num_layers",
            f"checkpoint_num_layers {model.checkpoint_num_layers} is more than num_layers {model.num_layers}",
        )
    yield from _find_pattern_conflicts(model, position)
    yield from _find_mup_conflicts(model)
    if position.randomized_positions is not None and position.randomized_positions < length:
        limit = position.randomized_positions
        yield "randomized_positions", f"randomized_positions {limit} is less than seq_length {length}"
    if position.continuous_positions and position.randomized_positions is None:
        yield "continuous_positions", "continuous_positions: true needs randomized_positions"


def _find_pattern_conflicts(model: ModelOptions, position: PositionOptions) -> Iterator[tuple[str, str]]:
    for key, values in position.list_patterns().items():
        layers, length = model.num_layers, len(values)
        if layers % length:
            yield (
                key,
                f"{key} is a pattern of {length} layers, which does not divide num_layers {layers}; use a pattern of "
                f"{_nearest_divisor(layers, length)} layers, or a value for each layer",
            )


def _find_mup_conflicts(model: ModelOptions) -> Iterator[tuple[str, str]]:
    if not model.use_mup:
        for name, field in ModelOptions.model_fields.items():
            if name.startswith("mup_") and (value := getattr(model, name)) != field.default:
                yield name, f"{name} is {value}, which has no effect without use_mup: true"
        return
    for name in ("head_dim", "embedding_multiplier", "query_pre_attn_scalar", "residual_multiplier", "logit_scale"):
        if (value := getattr(model, name)) != ModelOptions.model_fields[name].default:
            yield name, f"{name} {value:g} is not supported with use_mup: true, which sets it by its own rule"
    if model.mup_base_hidden_size is None:
        yield "use_mup", "use_mup: true needs mup_base_hidden_size, the width of the tuned model"
        return
    width, head = model.mup_base_hidden_size, model.hidden_size // model.num_attention_heads
    heads = model.mup_base_num_attention_heads
    if heads is None and width % head:
        yield (
            "mup_base_hidden_size",
            f"mup_base_hidden_size {width} is not divisible by this model's head size, {head}; give "
            "mup_base_num_attention_heads too",
        )
    if heads is not None and width % heads:
        yield (
            "mup_base_num_attention_heads",
            f"mup_base_hidden_size {width} is not divisible by mup_base_num_attention_heads {heads}",
        )
    for name in ("init_method", "output_layer_init_method"):
        if (method := getattr(model, name)).startswith("xavier"):
            yield (
                name,
                f"{name} {method}: its standard deviation follows from the matrix's shape, but muP derives it from the "
                "base model's; use normal, scaled_normal, small_init or wang_init",
            )


def find_indivisible_sizes(
    model: ModelOptions, *, tensor: int, context: int, pipeline: int
) -> Iterator[tuple[str, str]]:
    """Yield sizes of a model that the ranks cannot divide: the key to blame, and one sentence with the values.

    tensor, context, pipeline: numbers of ranks along these dimensions of the mesh.
    """
    sizes = (
        ("num_attention_heads", model.num_attention_heads),
        ("num_kv_heads", num_kv_heads(model)),
        (
            "a third of intermediate_size," if model.activation in GATED_ACTIVATIONS else "intermediate_size",
            ffn_hidden_size(model),
        ),
        ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by),
    )
    if indivisible := [(name, value) for name, value in sizes if value % tensor]:
        name, value = indivisible[0]
        common = gcd(*(size for _, size in sizes))
        yield (
            "model_parallel_size",
            f"{name} {value} is not divisible by model_parallel_size {tensor}; use {_nearest_divisor(common, tensor)}",
        )
    length = model.seq_length
    if context > 1 and length % (2 * context):
        advice = (
            f"use {_nearest_divisor(length // 2, context)}" if length % 2 == 0 else "an odd length cannot be divided"
        )
        yield (
            "context_parallel_size",
            f"seq_length {length} is not divisible by 2 × context_parallel_size {context}; {advice}",
        )
    if pipeline > model.num_layers:
        yield (
            "pipe_parallel_size",
            f"pipe_parallel_size {pipeline} is more than num_layers {model.num_layers}; use at most {model.num_layers}",
        )
    for name, size, dropouts, reason in (
        ("model_parallel_size", tensor, ("attention_dropout",), "every rank would drop the same entries of its heads"),
        ("context_parallel_size", context, DROPOUT_KEYS, "every rank would drop the same entries of its positions"),
        ("pipe_parallel_size", pipeline, DROPOUT_KEYS, "the dropped entries would depend on the layout"),
    ):
        for dropout in (key for key in dropouts if size > 1 and getattr(model, key)):
            yield dropout, f"{dropout} {getattr(model, dropout)}: with {name} {size} {reason}; set it to 0"


def _format_value(value: object) -> str:
    return "true" if value is True else str(value)


def _nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of `number` nearest to `size`; of two, the smaller."""
    return min((d for d in range(1, min(number, 2 * size) + 1) if number % d == 0), key=lambda d: abs(d - size))
