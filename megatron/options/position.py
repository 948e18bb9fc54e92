"""Keys of positions: encoding, score processor, temperature, softmax and window, for all layers or as a pattern.

The conflicts of these keys and of the model's are found together (`find_model_conflicts`), and so are sizes that ranks
cannot divide.
"""

from collections.abc import Callable, Iterator
from math import gcd, lcm
from typing import Annotated, Any, Literal, TypeVar

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from megatron.options.model import (
    DROPOUT_KEYS,
    GATED_ACTIVATIONS,
    GATED_RATIO,
    MAX_LENGTH,
    ModelOptions,
    get_ffn_hidden_size,
    get_num_kv_heads,
    get_qk_norm,
    has_qkv_bias,
)
from megatron.options.section import ConfigSection, config_field

MAX_POSITIONS = 10**7
"""Largest number of positions to sample from; a method's table may have a row for each."""

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable", "stick-breaking", "stick-breaking-remainder")

T = TypeVar("T")


def find_period(pattern: list[T]) -> list[T]:
    """Return the shortest list whose repetition gives the pattern."""
    lengths = (n for n in range(1, len(pattern) + 1) if len(pattern) % n == 0)
    return next((pattern[:n] for n in lengths if pattern == pattern[:n] * (len(pattern) // n)), pattern)


def _check_names(value: Any) -> Any:
    return _check_layers(value, "text", lambda item: isinstance(item, str))


def _check_softmax_types(value: Any) -> Any:
    return _check_layers(value, f"one of {', '.join(SOFTMAX_TYPES)}", lambda item: item in SOFTMAX_TYPES)


def _check_windows(value: Any) -> Any:
    if value is None:
        return value
    bounds = f"an integer from 1 to {MAX_LENGTH}"
    if isinstance(value, list):
        return _check_layers(value, f"{bounds}, or null", lambda item: item is None or _is_window(item))
    if type(value) is not int:
        raise PydanticKnownError("int_from_float" if isinstance(value, float) else "int_type")
    if value < 1:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    if value > MAX_LENGTH:
        raise PydanticKnownError("less_than_equal", {"le": MAX_LENGTH})
    return value


def _is_window(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_LENGTH


def _check_layers(value: Any, kind: str, is_valid: Callable[[Any], bool]) -> Any:
    """Check a value or a list of values.

    A list is reduced to its period, and to one value if all are the same, so that equal models have equal keys.
    """
    if not isinstance(value, list):
        if is_valid(value):
            return value
        raise PydanticCustomError("by_layer", f"it must be {kind}, or a list of such values, which repeats over layers")
    if not value:
        raise PydanticCustomError(
            "by_layer", "it must be a value for each layer, or a pattern that repeats over the layers"
        )
    for number, item in enumerate(value, start=1):
        if not is_valid(item):
            raise PydanticCustomError("by_layer", f"item {number} must be {kind}")
    period = find_period(value)
    return period[0] if len(period) == 1 else period


LAYER_KEYS = ("pos_emb", "attention_window", "score_processor", "attention_temperature", "softmax_type")
"""Keys that may differ between layers: one value for all, or a list that repeats over the layers."""


class PositionOptions(ConfigSection):
    """Position encoding, score processor and attention temperature."""

    pos_emb: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "learned",
        "position encoding, a name from `./deepy.py positions` or of a file of your own (docs/python.md); a list is a "
        "pattern of layers",
        policy="architecture",
    )
    pos_emb_options: dict[str, Any] = config_field(
        dict,
        "options of the encoding (`./deepy.py positions`); with several encodings, each reads its own",
        policy="architecture",
    )
    pos_emb_per_layer: bool = config_field(
        False,
        "separate encoding parameters in each layer (DAPE) instead of shared ones (KERPLE)",
        policy="architecture",
    )
    attention_window: Annotated[int | list[int | None] | None, PlainValidator(_check_windows)] = config_field(
        None,
        "number of last tokens that a token attends to, including itself; all if absent; a list is a pattern of "
        "layers, with null for all",
        policy="context",
    )
    attention_mask: Literal["causal", "document"] = config_field(
        "causal",
        "attention to all earlier tokens of a row (causal), or only within a document, with positions from 0 "
        "(document)",
        policy="context",
    )
    randomized_positions: int | None = config_field(
        None,
        "number of positions from which each sequence samples its own, in ascending order (Ruoss et al. 2023); at "
        "least the longest length to evaluate",
        ge=1,
        le=MAX_POSITIONS,
        policy="context",
    )
    continuous_positions: bool = config_field(
        False,
        "with randomized_positions: sample real numbers instead of integers (2602.14050)",
        policy="context",
    )
    score_processor: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "score processor: none, or a name from `./deepy.py positions`; a list is a pattern of layers",
        policy="architecture",
    )
    score_processor_options: dict[str, Any] = config_field(
        dict,
        "options of the processor (`./deepy.py positions`); with several processors, each reads its own",
        policy="architecture",
    )
    attention_temperature: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "factor on each query that depends on its position or number of visible keys: none, or a name from "
        "`./deepy.py positions`; a list is a pattern of layers",
        policy="architecture",
    )
    attention_temperature_options: dict[str, Any] = config_field(
        dict,
        "options of the temperature (`./deepy.py positions`); with several temperatures, each reads its own",
        policy="architecture",
    )

    softmax_type: Annotated[str | list[str], PlainValidator(_check_softmax_types)] = config_field(
        "vanilla",
        "softmax of attention: vanilla; off-by-one, with 1 added to the denominator; learnable, with exp of a learned "
        "sink per head added (gpt-oss); stick-breaking, where each key receives a fraction of the weight that later "
        "keys leave (Tan et al. 2024); or stick-breaking-remainder, where the token itself receives the rest; a list "
        "is a pattern of layers",
        policy="architecture",
    )

    @property
    def encodings(self) -> list[str]:
        """Encodings of the layers, without duplicates."""
        return self._list_distinct("pos_emb")

    @property
    def processors(self) -> list[str]:
        """Score processors of the layers, without duplicates; `none` for layers without one."""
        return self._list_distinct("score_processor")

    @property
    def temperatures(self) -> list[str]:
        """Temperatures of the layers, without duplicates; `none` for layers without one."""
        return self._list_distinct("attention_temperature")

    @property
    def encoding(self) -> str:
        """`pos_emb` of one layer. Raises TypeError for a pattern of layers."""
        return self._get_single("pos_emb")

    @property
    def processor(self) -> str:
        """`score_processor` of one layer."""
        return self._get_single("score_processor")

    @property
    def temperature(self) -> str:
        """`attention_temperature` of one layer."""
        return self._get_single("attention_temperature")

    @property
    def softmax(self) -> str:
        """`softmax_type` of one layer."""
        return self._get_single("softmax_type")

    @property
    def window(self) -> int | None:
        """`attention_window` of one layer."""
        return self._get_single("attention_window")

    def _list_distinct(self, key: str) -> list[str]:
        given = getattr(self, key)
        return list(dict.fromkeys(given if isinstance(given, list) else [given]))

    def _get_single(self, key: str) -> Any:
        if isinstance(value := getattr(self, key), list):
            raise TypeError(f"{key} is a pattern of layers: {value}")
        return value

    def list_patterns(self) -> dict[str, list[Any]]:
        """Return the keys that differ between layers, with their lists."""
        return {key: value for key in LAYER_KEYS if isinstance(value := getattr(self, key), list)}

    @property
    def period(self) -> int:
        """Number of layers after which all patterns repeat; 1 if all layers are equal."""
        return lcm(*map(len, self.list_patterns().values()))

    def get_layer_options(self, layer: int) -> "PositionOptions":
        """Return the options of one layer, counted from 0; the same object if no key is a list."""
        patterns = self.list_patterns()
        return (
            self.replace(**{key: values[layer % len(values)] for key, values in patterns.items()}) if patterns else self
        )


def find_model_conflicts(model: ModelOptions, position: PositionOptions) -> Iterator[tuple[str, str]]:
    """Yield conflicting values: the key to blame, and one sentence with the values."""
    heads, width, length = model.num_attention_heads, model.hidden_size, model.seq_length
    if width % heads and model.head_dim is None:
        yield "num_attention_heads", f"hidden_size {width} is not divisible by num_attention_heads {heads}"
    if model.num_kv_heads is not None and heads % model.num_kv_heads:
        yield (
            "num_kv_heads",
            f"num_attention_heads {heads} is not divisible by num_kv_heads {model.num_kv_heads}; "
            f"use {_find_nearest_divisor(heads, model.num_kv_heads)}",
        )
    if model.use_bias_in_attn_linear and not has_qkv_bias(model):
        yield (
            "use_bias_in_qkv",
            "use_bias_in_qkv: false needs use_bias_in_attn_linear: false; a bias in the output projection alone is "
            "not supported",
        )
    if get_ffn_hidden_size(model) == 0:
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
    if not model.layernorm_bias and "layernorm" not in (model.norm, get_qk_norm(model)):
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
            nearest = _find_nearest_divisor(layers, length)
            yield (
                key,
                f"{key} is a pattern of {length} layers, which does not divide num_layers {layers}; use a pattern of "
                f"{nearest} layer{'s' * (nearest > 1)}, or a value for each layer",
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
        ("num_kv_heads", get_num_kv_heads(model)),
        (
            "a third of intermediate_size," if model.activation in GATED_ACTIVATIONS else "intermediate_size",
            get_ffn_hidden_size(model),
        ),
        ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by),
    )
    if indivisible := [(name, value) for name, value in sizes if value % tensor]:
        name, value = indivisible[0]
        common = gcd(*(size for _, size in sizes))
        yield (
            "model_parallel_size",
            f"{name} {value} is not divisible by model_parallel_size {tensor}; "
            f"use {_find_nearest_divisor(common, tensor)}",
        )
    length = model.seq_length
    if context > 1 and length % (2 * context):
        advice = (
            f"use {_find_nearest_divisor(length // 2, context)}"
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


def _find_nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of `number` nearest to `size`; of two, the smaller."""
    return min((d for d in range(1, min(number, 2 * size) + 1) if number % d == 0), key=lambda d: abs(d - size))
