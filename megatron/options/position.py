"""Keys of positions: encoding, score processor, temperature, softmax and window, for all layers or as a pattern."""

from collections.abc import Callable
from math import lcm
from typing import Annotated, Any, Literal, TypeVar

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from megatron.options.model import MAX_LENGTH
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
    bounds = f"a whole number of 1 to {MAX_LENGTH}"
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
            "by_layer", "expected a value for each layer, or a pattern that repeats over the layers"
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
        "position encoding, named after a file in megatron/position/encodings (`./deepy.py positions`); a list is a "
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
        "score processor: none, or a name of a file in megatron/position/processors; a list is a pattern of layers",
        policy="architecture",
    )
    score_processor_options: dict[str, Any] = config_field(
        dict,
        "options of the processor (`./deepy.py positions`); with several processors, each reads its own",
        policy="architecture",
    )
    attention_temperature: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "factor on each query that depends on its number of visible keys: none, or a name of a file in "
        "megatron/position/temperatures; a list is a pattern of layers",
        policy="architecture",
    )
    attention_temperature_options: dict[str, Any] = config_field(
        dict,
        "options of the temperature (`./deepy.py positions`); with several temperatures, each reads its own",
        policy="architecture",
    )

    softmax_type: Annotated[str | list[str], PlainValidator(_check_softmax_types)] = config_field(
        "vanilla",
        "attention softmax: vanilla; off-by-one, with 1 added to the denominator; learnable, with exp of a learned "
        "sink per head added (gpt-oss); stick-breaking, where each key takes a share of what later keys leave (Tan et "
        "al. 2024); or stick-breaking-remainder, where the token itself takes the remainder; a list is a pattern of "
        "layers",
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
        """Number of layers after which all patterns repeat; 1 if all layers are alike."""
        return lcm(*map(len, self.list_patterns().values()))

    def for_layer(self, layer: int) -> "PositionOptions":
        """Return the options of one layer, counted from 0; the same object if no key is a list."""
        patterns = self.list_patterns()
        return (
            self.replace(**{key: values[layer % len(values)] for key, values in patterns.items()}) if patterns else self
        )
