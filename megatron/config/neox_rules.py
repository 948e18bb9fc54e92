"""Kinds of rules for the keys of GPT-NeoX and its relatives.

Some rules yield our key as soon as the layer is read (`translate`). Others depend on keys that a later file may change;
they are deferred (`ConfigLayers.defer`) until all layers are merged (`resolve`; `neox_deferred_rules.py`). To add a
kind, add a class here or there, and a table of its keys in `neox_keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from megatron.config.config_layers import ConfigLayers, KeyRule, SourcedValue, ValueRule
from megatron.config.schema import KeyPath, map_key_owners
from megatron.config.yaml_files import format_value, quote_value

MODEL_SECTIONS = ("model", "position")
"""Sections whose keys decide what a model computes."""


def format_code(names: Iterable[str]) -> str:
    """Format names as code in Markdown."""
    return ", ".join(f"`{name}`" for name in names)


def is_model_key(farfield_key: str) -> bool:
    return map_key_owners().get(farfield_key.split(".")[0]) in MODEL_SECTIONS


class NeoxRule(KeyRule):
    """Rule for keys of another project, with its description for the documentation."""

    keys: tuple[str, ...]
    advice: str = ""
    """Advice for keys that the rule rejects with any value."""

    def has_no_effect(self, value: Any) -> bool:
        """Return True if a value has no effect here, independently of the other keys."""
        return False

    def describes_model(self) -> bool:
        """Return True if the keys decide what a model computes rather than how it is trained."""
        return False

    def describe(self, name: str) -> str:
        """Describe the handling of a key in one line."""
        raise NotImplementedError

    def build_reference_rows(self) -> list[list[str]]:
        """Return the rows of the rule in the tables of `docs/configuration.md`."""
        raise NotImplementedError


class SingleKeyRule(NeoxRule):
    """Rule for one key."""

    key: str

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.key,)


class DeferredRule(SingleKeyRule):
    """Rule that depends on the final values of other keys."""

    def translate(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        layers.defer(name, setting)
        return iter(())


@dataclass(frozen=True)
class Alias(SingleKeyRule):
    """Key with the same meaning under another name."""

    key: str
    farfield_key: str
    switch_values: tuple[Any, Any] | None = None
    """Our values for true and false, if the key is a switch there."""
    offset: int = 0
    """Number added to the value."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of ours that the key implies, with their values."""
    null_value: Any = None
    """Our value for null."""
    is_suggested: ClassVar[bool] = True

    def translate(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        value, where = setting.value, setting.where
        if self.switch_values is not None:
            if value is not None and not isinstance(value, bool):
                layers.problems.append(f"{where}: {name} is {quote_value(value)}; it must be true or false")
                return
            on_value, off_value = self.switch_values
            setting = replace(setting, value=on_value if value else off_value)
        if value is None and self.null_value is not None:
            setting = replace(setting, value=self.null_value)
        if self.offset and type(value) is int:
            setting = replace(setting, value=value + self.offset)
        meaning = f"{self.farfield_key}{self._describe_offset()}{self._describe_implied()}"
        layers.notes.append(f"{where}: {name} is {meaning} here")
        yield from layers.translate_farfield_key(tuple(self.farfield_key.split(".")), setting)
        yield from ((tuple(key.split(".")), value) for key, value in self.implied.items())

    def describes_model(self) -> bool:
        return is_model_key(self.farfield_key)

    def describe(self, name: str) -> str:
        return f"is {self.farfield_key}{self._describe_values()} here"

    def build_reference_rows(self) -> list[list[str]]:
        return [[f"`{self.key}`", f"`{self.farfield_key}`{self._describe_values()}"]]

    def _describe_offset(self) -> str:
        return f" (value + {self.offset})" if self.offset else ""

    def _describe_values(self) -> str:
        switched = ", {} or {}".format(*map(format_value, self.switch_values)) if self.switch_values else ""
        return switched + self._describe_offset() + self._describe_implied()

    def _describe_implied(self) -> str:
        return "".join(f", with {key}: {format_value(value)}" for key, value in self.implied.items())


@dataclass(frozen=True)
class Ignored(NeoxRule):
    """Key that is accepted, with a note that it has no effect."""

    keys: tuple[str, ...]
    reason: str

    def translate(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        layers.note_ignored(name, self.reason)
        return iter(())

    def has_no_effect(self, value: Any) -> bool:
        return True

    def describe(self, name: str) -> str:
        return f"no effect: {self.reason}"

    def build_reference_rows(self) -> list[list[str]]:
        return [[format_code(self.keys), self.reason]]


@dataclass(frozen=True)
class Unsupported(NeoxRule):
    """Key that raises an error, unless its value disables the feature (`cpu_offload: false`)."""

    keys: tuple[str, ...]
    advice: str
    accepted_values: tuple[Any, ...] = (None, False)

    def translate(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        if not self.has_no_effect(setting.value):
            layers.problems.append(
                f"{setting.where}: {name}: {format_value(setting.value)} is not supported: {self.advice}"
            )
        return iter(())

    def has_no_effect(self, value: Any) -> bool:
        return value in self.accepted_values

    def describe(self, name: str) -> str:
        return f"not supported: {self.advice}"

    def build_reference_rows(self) -> list[list[str]]:
        accepted = [format_value(value) for value in self.accepted_values if value is not None]
        return [[format_code(self.keys), self.advice, " · ".join(accepted)]]


class ChosenMethods(NamedTuple):
    """Position encodings and score processors of the final layers, without duplicates."""

    encodings: tuple[str, ...]
    processors: tuple[str, ...]


def list_final_values(layers: ConfigLayers, key: str) -> tuple[str, ...]:
    """Return the values of a key that may be a pattern of layers, without duplicates."""
    value = layers.get_value(key)
    return tuple(dict.fromkeys(map(str, value if isinstance(value, list) else [value])))


@dataclass(frozen=True)
class ValidatedNoop(DeferredRule):
    """Key that is accepted without effect if `find_problem(value, methods)` returns None, and rejected otherwise."""

    key: str
    find_problem: Callable[[Any, ChosenMethods], str | None]
    reason: str
    resolve_order: ClassVar[int] = 4

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        methods = ChosenMethods(list_final_values(layers, "pos_emb"), list_final_values(layers, "score_processor"))
        if problem := self.find_problem(setting.value, methods):
            layers.problems.append(f"{setting.where}: {name}: {problem}")
        else:
            layers.notes.append(f"{setting.where}: {name} has no effect: {self.reason}")

    def describes_model(self) -> bool:
        return True

    def describe(self, name: str) -> str:
        return f"no effect: {self.reason}"

    def build_reference_rows(self) -> list[list[str]]:
        return [[f"`{self.key}`", f"{self.reason}; rejected if it would have an effect"]]


# Values


@dataclass(frozen=True)
class ValueAlias(ValueRule):
    """Other name for one of our values."""

    farfield_value: Any

    def translate(self, path: KeyPath, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        yield path, self.farfield_value


@dataclass(frozen=True)
class UnsupportedValue(ValueRule):
    """Value that is rejected, with advice beyond the list of valid values."""

    advice: str

    def translate(self, path: KeyPath, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        layers.problems.append(f"{setting.where}: {'.'.join(path)}: {setting.value} is not supported; {self.advice}")
        return iter(())


@dataclass(frozen=True)
class PositionAlias(ValueRule):
    """Our keys for another project's name of a position encoding. None leaves a key unset."""

    encoding: str
    processor: str | None = None
    per_layer: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `pos_emb_options`."""
    decays: bool = False
    """True if the encoding has parameters, to which GPT-NeoX applies weight decay."""

    def get_farfield_keys(self) -> dict[KeyPath, Any]:
        """Return our keys as paths, with their values."""
        values = {
            "pos_emb": self.encoding,
            "score_processor": self.processor,
            "pos_emb_per_layer": self.per_layer,
            "decay_positions": self.decays or None,
        }
        keys: dict[KeyPath, Any] = {(name,): value for name, value in values.items() if value is not None}
        return keys | {("pos_emb_options", option): value for option, value in self.options.items()}

    def translate(self, path: KeyPath, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        meaning = self.encoding + (f" with score_processor {self.processor}" if self.processor else "")
        meaning += ", pos_emb_per_layer: true" if self.per_layer else ""
        meaning += "".join(
            f", pos_emb_options.{option}: {format_value(value)}" for option, value in self.options.items()
        )
        meaning += ", decay_positions: true" if self.decays else ""
        layers.notes.append(f"{setting.where}: pos_emb {setting.value} is {meaning} here")
        yield from self.get_farfield_keys().items()

    def describe(self, code: str = "") -> str:
        """Describe our keys and values in one line. code: delimiter around each."""
        values = {".".join(path): value for path, value in self.get_farfield_keys().items() if value is not False}
        return ", ".join(f"{code}{key}: {format_value(value)}{code}" for key, value in values.items())
