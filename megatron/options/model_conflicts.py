"""Values of a model that contradict each other, or that ranks cannot divide."""

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
    """Values that contradict each other: the key to blame, and one sentence with the values."""
    heads, width, length = model.num_attention_heads, model.hidden_size, model.seq_length
    if width % heads and model.head_dim is None:
        yield "num_attention_heads", f"hidden_size {width} is not divisible by num_attention_heads {heads}"
    if model.num_kv_heads is not None and heads % model.num_kv_heads:
        yield (
            "num_kv_heads",
            f"num_attention_heads {heads} is not divisible by num_kv_heads {model.num_kv_heads}; "
            f"{_nearest_divisor(heads, model.num_kv_heads)} would do",
        )
    if model.use_bias_in_attn_linear and not has_qkv_bias(model):
        yield (
            "use_bias_in_qkv",
            "use_bias_in_qkv: false needs use_bias_in_attn_linear: false; a bias after attention alone is not offered",
        )
    if ffn_hidden_size(model) == 0:
        yield (
            "intermediate_size",
            f"intermediate_size {model.intermediate_size} leaves no width with activation {model.activation}, which "
            f"takes a third of it; it must be at least {GATED_RATIO}",
        )
    if model.gpt_j_tied and not model.gpt_j_residual:
        yield "gpt_j_tied", "gpt_j_tied: true needs gpt_j_residual: true"
    if model.norm_placement != "pre" and model.gpt_j_residual:
        yield (
            "norm_placement",
            f"norm_placement {model.norm_placement} is for layers in series; gpt_j_residual: true reads one norm's "
            "output twice",
        )
    for key in ("qk_norm", "qk_layernorm_over_heads"):
        if getattr(model, key) and not model.use_qk_layernorm:
            yield key, f"{key}: {_format_value(getattr(model, key))} needs use_qk_layernorm: true"
    if not model.layernorm_bias and "layernorm" not in (model.norm, qk_norm(model)):
        yield "layernorm_bias", "layernorm_bias: false is for layernorm; rmsnorm has no bias as it is"
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
        yield "continuous_positions", "continuous_positions: true says how randomized_positions are drawn; set that too"


def _find_pattern_conflicts(model: ModelOptions, position: PositionOptions) -> Iterator[tuple[str, str]]:
    for key, values in position.list_patterns().items():
        layers, length = model.num_layers, len(values)
        if layers % length:
            yield (
                key,
                f"{key} is a pattern of {length} layers, which does not divide num_layers {layers}; it repeats from "
                f"the first layer to the last: {_nearest_divisor(layers, length)} would do, or a value for each layer",
            )


def _find_mup_conflicts(model: ModelOptions) -> Iterator[tuple[str, str]]:
    if not model.use_mup:
        for name, field in ModelOptions.model_fields.items():
            if name.startswith("mup_") and (value := getattr(model, name)) != field.default:
                yield name, f"{name} is {value}, which has no effect without use_mup: true"
        return
    for name in ("head_dim", "embedding_multiplier", "query_pre_attn_scalar", "logit_scale"):
        if (value := getattr(model, name)) != ModelOptions.model_fields[name].default:
            yield name, f"{name} {value:g} is not offered with use_mup: true, which has a rule of its own for it"
    if model.mup_base_hidden_size is None:
        yield "use_mup", "use_mup: true needs mup_base_hidden_size, the width that was tuned"
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
                f"{name} {method}: its deviation follows from a matrix's own shape, where muP's follows from the base "
                "model's; use normal, scaled_normal, small_init or wang_init",
            )


def find_indivisible_sizes(
    model: ModelOptions, *, tensor: int, context: int, pipeline: int
) -> Iterator[tuple[str, str]]:
    """What so many ranks cannot divide of a model: the key to blame, and one sentence with the values.

    tensor, context, pipeline: ranks along these dimensions of the mesh.
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
            f"{name} {value} is not divisible by model_parallel_size {tensor}; {_nearest_divisor(common, tensor)} "
            f"would do",
        )
    length = model.seq_length
    if context > 1 and length % (2 * context):
        advice = (
            f"{_nearest_divisor(length // 2, context)} would do"
            if length % 2 == 0
            else "an odd length cannot be divided"
        )
        yield (
            "context_parallel_size",
            f"seq_length {length} is not divisible by 2 × context_parallel_size {context}; {advice}",
        )
    if pipeline > model.num_layers:
        yield (
            "pipe_parallel_size",
            f"pipe_parallel_size {pipeline} is more than num_layers {model.num_layers}; {model.num_layers} would do",
        )
    for name, size, dropouts, reason in (
        ("model_parallel_size", tensor, ("attention_dropout",), "every rank would drop the same entries of its heads"),
        ("context_parallel_size", context, DROPOUT_KEYS, "every rank would drop the same entries of its places"),
        ("pipe_parallel_size", pipeline, DROPOUT_KEYS, "what is dropped would follow from the layout"),
    ):
        for dropout in (key for key in dropouts if size > 1 and getattr(model, key)):
            yield dropout, f"{dropout} {getattr(model, dropout)}: with {name} {size} {reason}; set it to 0"


def _format_value(value: object) -> str:
    return "true" if value is True else str(value)


def _nearest_divisor(number: int, size: int) -> int:
    """The divisor of `number` that is nearest to `size`, of two the smaller."""
    return min((d for d in range(1, min(number, 2 * size) + 1) if number % d == 0), key=lambda d: abs(d - size))
