"""Keys of positions: encoding, score processor, temperature, softmax and window, for all layers or by a pattern."""

from collections.abc import Callable
from math import lcm
from typing import Annotated, Any, Literal, TypeVar

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from megatron.options.model import MAX_LENGTH
from megatron.options.section import ConfigSection, config_field

MAX_POSITIONS = 10**7
"""Positions to draw from: a table of a method may hold a row for each."""

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable", "stick-breaking", "stick-breaking-remainder")

T = TypeVar("T")


def find_period(pattern: list[T]) -> list[T]:
    """The shortest list that, repeated, gives the whole one."""
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
    """A value, or a list by its period, so that equal models have equal keys; one value where all are the same."""
    if not isinstance(value, list):
        if is_valid(value):
            return value
        raise PydanticCustomError("by_layer", f"it must be {kind}, or a list of such values, which repeats over layers")
    if not value:
        raise PydanticCustomError("by_layer", "it needs a value for each layer, or a pattern that repeats over them")
    for number, item in enumerate(value, start=1):
        if not is_valid(item):
            raise PydanticCustomError("by_layer", f"item {number} must be {kind}")
    period = find_period(value)
    return period[0] if len(period) == 1 else period


LAYER_KEYS = ("pos_emb", "attention_window", "score_processor", "attention_temperature", "softmax_type")
"""The keys that may differ from layer to layer: one value for all, or a list that repeats from the first to the last.
"""


class PositionOptions(ConfigSection):
    """Which position encoding, which score processor on top of it, and which temperature of attention."""

    pos_emb: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "learned",
        "position encoding: a file of megatron/position/encodings, see `./deepy.py positions`; a list is a pattern of "
        "layers",
        policy="architecture",
    )
    pos_emb_options: dict[str, Any] = config_field(
        dict,
        "options of that encoding, see `./deepy.py positions`; of several, each takes those that it has",
        policy="architecture",
    )
    pos_emb_per_layer: bool = config_field(
        False, "one set of encoding parameters per layer (DAPE) instead of one for all (KERPLE)", policy="architecture"
    )
    attention_window: Annotated[int | list[int | None] | None, PlainValidator(_check_windows)] = config_field(
        None,
        "every token sees the last this many only, its own included; all if absent; a list is a pattern of layers, "
        "null in it all",
        policy="context",
    )
    attention_mask: Literal["causal", "document"] = config_field(
        "causal",
        "which tokens of a row a token sees: all before it (causal), or those of its own document alone, whose "
        "positions begin at 0 (document)",
        policy="context",
    )
    randomized_positions: int | None = config_field(
        None,
        "each sequence's positions are drawn from this many, in ascending order (Ruoss et al. 2023); at least the "
        "longest length to be read",
        ge=1,
        le=MAX_POSITIONS,
        policy="context",
    )
    continuous_positions: bool = config_field(
        False,
        "with randomized_positions: real numbers below that many instead of integers (2602.14050)",
        policy="context",
    )
    score_processor: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "score processor: none, or a file of megatron/position/processors; a list is a pattern of layers",
        policy="architecture",
    )
    score_processor_options: dict[str, Any] = config_field(
        dict,
        "options of that processor, see `./deepy.py positions`; of several, each takes those that it has",
        policy="architecture",
    )
    attention_temperature: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "factor on each query, by which its scores grow with the keys that it sees: none, or a file of "
        "megatron/position/temperatures; a list is a pattern of layers",
        policy="architecture",
    )
    attention_temperature_options: dict[str, Any] = config_field(
        dict,
        "options of that temperature, see `./deepy.py positions`; of several, each takes those that it has",
        policy="architecture",
    )

    softmax_type: Annotated[str | list[str], PlainValidator(_check_softmax_types)] = config_field(
        "vanilla",
        "what makes attention weights of logits: vanilla; off-by-one, a denominator with 1 more; learnable, with exp "
        "of a sink more, a head's own (gpt-oss); stick-breaking, where each key takes its share of what later "
        "ones have left (Tan et al. 2024); or stick-breaking-remainder, where the token itself takes what all leave; a "
        "list is a pattern of layers",
        policy="architecture",
    )

    @property
    def encodings(self) -> list[str]:
        """The encodings of the layers, each once."""
        return self._list_distinct("pos_emb")

    @property
    def processors(self) -> list[str]:
        """The score processors of the layers, each once; `none` where layers have none."""
        return self._list_distinct("score_processor")

    @property
    def temperatures(self) -> list[str]:
        """The temperatures of the layers, each once; `none` where layers have none."""
        return self._list_distinct("attention_temperature")

    @property
    def encoding(self) -> str:
        """`pos_emb` of one layer; not for a pattern of layers, which has none."""
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
        """The keys that differ from layer to layer, with their lists."""
        return {key: value for key in LAYER_KEYS if isinstance(value := getattr(self, key), list)}

    @property
    def period(self) -> int:
        """Layers after which all patterns begin anew; 1 where all layers are alike."""
        return lcm(*map(len, self.list_patterns().values()))

    def for_layer(self, layer: int) -> "PositionOptions":
        """The same with the values of one layer, counted from 0; itself where no key is a list."""
        patterns = self.list_patterns()
        return (
            self.replace(**{key: values[layer % len(values)] for key, values in patterns.items()}) if patterns else self
        )
