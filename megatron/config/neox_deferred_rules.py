"""Rules for keys of GPT-NeoX whose meaning depends on the final values of other keys.

A later file may change those, so most rules are deferred (`ConfigLayers.defer`) until all layers are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from megatron.config.config_layers import ConfigLayers, SourcedValue
from megatron.config.neox_rules import DeferredRule, NeoxRule, format_code, is_model_key, list_final_values
from megatron.config.schema import KeyPath
from megatron.config.yaml_files import format_value, quote_value
from megatron.options.position import find_period


class MethodOption(NamedTuple):
    """Option of some methods.

    `method_key` is the key that names the method (`pos_emb` or `score_processor`), `option` the name among its options.
    """

    method_key: str
    methods: tuple[str, ...]
    option: str
    divisor_key: str | None = None
    """Key whose value divides the option's, or None."""
    implied: Mapping[str, Any] = {}  # never changed; picklable, unlike MappingProxyType
    """Keys implied by the project that has the key, set unless a file sets them."""

    def describe(self, key: str, code: str = "") -> str:
        """Describe the option that `key` sets, and its methods. code: delimiter around the names of keys."""
        value = f" to {code}{key}{code} / {code}{self.divisor_key}{code}" if self.divisor_key else ""
        implied = " and ".join(f"{code}{name}: {format_value(value)}{code}" for name, value in self.implied.items())
        return (
            f"{code}{self.method_key}_options.{self.option}{code} of {' and '.join(self.methods)}{value}"
            f"{', with ' * bool(implied)}{implied}"
        )


@dataclass(frozen=True)
class MethodOptionAlias(DeferredRule):
    """Key that sets options of some methods, and has no effect with others."""

    key: str
    options: tuple[MethodOption, ...]
    is_suggested: ClassVar[bool] = True
    resolve_order: ClassVar[int] = 1

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        """Set the options of the chosen methods that have them."""
        if setting.value is None:
            return
        chosen_methods = [list_final_values(layers, option.method_key) for option in self.options]
        pairs = list(zip(self.options, chosen_methods, strict=True))
        taken = [option for option, methods in pairs if set(methods) & set(option.methods)]
        for option in taken:
            self._resolve_option(name, setting, layers, option)
        if not taken:
            reasons = [
                f"{option.method_key} is {', '.join(methods)}, not {' or '.join(option.methods)}"
                for option, methods in pairs
            ]
            layers.notes.append(f"{setting.where}: {name} has no effect: {'; '.join(reasons)}")

    def _resolve_option(self, name: str, setting: SourcedValue, layers: ConfigLayers, option: MethodOption) -> None:
        path: KeyPath = (f"{option.method_key}_options", option.option)
        meaning = ".".join(path)
        if option.divisor_key is not None:
            divisor = layers.values.get((option.divisor_key,))
            operands = (setting.value, divisor.value if divisor else None)
            numbers = [operand for operand in operands if type(operand) in (int, float)]
            if len(numbers) < 2 or not numbers[1]:
                layers.problems.append(
                    f"{setting.where}: {name} is {quote_value(setting.value)}; it needs a number, and "
                    f"{option.divisor_key}"
                )
                return
            setting = replace(setting, value=numbers[0] / numbers[1])
            meaning = f"{meaning} × {option.divisor_key}"
        old = layers.values.get(path)
        is_newer = old is None or setting.layer >= old.layer
        if old is not None:
            layers.note_replaced(path, *((old, setting) if is_newer else (setting, old)))
        if is_newer:
            layers.values[path] = setting
            layers.notes.append(f"{setting.where}: {name} is {meaning} here")
        for key, value in option.implied.items():
            if (key,) not in layers.values:
                layers.values[(key,)] = replace(setting, value=value)
                layers.notes.append(f"{setting.where}: {name} means {key}: {format_value(value)} here")

    def describes_model(self) -> bool:
        return True

    def describe(self, name: str) -> str:
        return f"sets {', and '.join(option.describe(name) for option in self.options)}"

    def build_reference_rows(self) -> list[list[str]]:
        options = ", and ".join(option.describe(self.key, code="`") for option in self.options)
        return [[f"`{self.key}`", f"sets {options}; no effect on others"]]


@dataclass(frozen=True)
class FractionOf(DeferredRule):
    """Fraction of another key, which may be in another file: `farfield_key` becomes `key × base_key`, rounded down."""

    key: str
    base_key: str
    farfield_key: str
    resolve_order: ClassVar[int] = 2

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        fraction, where = setting.value, setting.where
        if fraction is None:
            return
        base = layers.values.get((self.base_key,))
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < float("inf"):
            layers.problems.append(f"{where}: {name} is {quote_value(fraction)}; it must be a finite positive number")
        elif layers.is_replaced(name, setting, (self.farfield_key,)):
            return
        elif base is not None and isinstance(base.value, int):
            try:
                value = int(float(fraction) * base.value)  # as in GPT-NeoX
            except OverflowError:
                layers.problems.append(f"{where}: {name} × {self.base_key} is too large for {self.farfield_key}")
                return
            layers.values[(self.farfield_key,)] = replace(setting, value=value)
            layers.notes.append(f"{where}: {name} {format_value(fraction)} sets {self.farfield_key} to {value}")

    def describes_model(self) -> bool:
        return is_model_key(self.farfield_key)

    def describe(self, name: str) -> str:
        return f"sets {self.farfield_key} = {name} × {self.base_key}"

    def build_reference_rows(self) -> list[list[str]]:
        return [[f"`{self.key}`", f"`{self.farfield_key}` = {self.key} × `{self.base_key}`"]]


@dataclass(frozen=True)
class ValueSwitch(DeferredRule):
    """Switch that, if true, replaces some values of one of our keys."""

    key: str
    farfield_key: str
    values: dict[Any, Any]
    resolve_order: ClassVar[int] = 3

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        is_on, where = setting.value, setting.where
        value = layers.get_value(self.farfield_key)
        if is_on not in (None, True, False):
            layers.problems.append(f"{where}: {name} is {quote_value(is_on)}; it must be true or false")
        elif is_on and value in self.values:
            layers.values[(self.farfield_key,)] = replace(setting, value=self.values[value])
            layers.notes.append(f"{where}: {name} changes {self.farfield_key} {value} to {self.values[value]}")
        else:
            layers.notes.append(f"{where}: {name} {format_value(is_on)} keeps {self.farfield_key} {value}")

    def describes_model(self) -> bool:
        return True

    def describe(self, name: str) -> str:
        meanings = " and ".join(f"{old} to {new}" for old, new in self.values.items())
        return f"true changes {self.farfield_key} from {meanings} here"

    def build_reference_rows(self) -> list[list[str]]:
        return [
            [f"`{self.key}`", f"true: `{self.farfield_key}: {new}` instead of `{self.farfield_key}: {old}`"]
            for old, new in self.values.items()
        ]


class StepKey(NamedTuple):
    """Key with a step number, read if a switch is true."""

    key: str
    default: int
    offset: int = 0
    """Number added to the step."""

    def describe(self) -> str:
        return f"{self.key}{f' + {self.offset}' if self.offset else ''}"


@dataclass(frozen=True)
class EventSwitch(DeferredRule):
    """Switch of an event whose steps are in other keys of GPT-NeoX, and in our keys."""

    key: str
    steps: Mapping[str, StepKey]
    """Step keys by our key."""
    is_suggested: ClassVar[bool] = True

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        is_on, where = setting.value, setting.where
        if is_on not in (None, True, False):
            layers.problems.append(f"{where}: {name} is {quote_value(is_on)}; it must be true or false")
        elif not is_on:
            layers.notes.append(f"{where}: {name} {format_value(is_on)} has no effect")
        else:
            for farfield_key, step in self.steps.items():
                self._resolve_step(name, setting, layers, farfield_key, step)

    def _resolve_step(
        self, name: str, setting: SourcedValue, layers: ConfigLayers, farfield_key: str, step: StepKey
    ) -> None:
        path, where = tuple(farfield_key.split(".")), setting.where
        value = layers.deferred[step.key].value if step.key in layers.deferred else step.default
        if layers.is_replaced(name, setting, path):
            return
        if type(value) is int:
            layers.values[path] = replace(setting, value=value + step.offset)
            layers.notes.append(f"{where}: {name} sets {farfield_key} to {value + step.offset}")
        else:
            layers.problems.append(
                f"{layers.deferred[step.key].where}: {step.key} is {quote_value(value)}; it must be a step"
            )

    def describe(self, name: str) -> str:
        meanings = (f"{farfield_key} = {step.describe()} ({step.default})" for farfield_key, step in self.steps.items())
        return f"true means {' and '.join(meanings)} here"

    def build_reference_rows(self) -> list[list[str]]:
        meanings = (
            f"`{farfield_key}` = {step.describe()} ({step.default})" for farfield_key, step in self.steps.items()
        )
        return [[f"`{self.key}`", f"true: {', '.join(meanings)}"]]


@dataclass(frozen=True)
class StepKeyRule(DeferredRule):
    """Step key of an `EventSwitch`; without effect if all its switches are off."""

    step: StepKey
    switches: tuple[str, ...]

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.step.key

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        if not any(switch in layers.deferred and layers.deferred[switch].value for switch in self.switches):
            layers.notes.append(f"{setting.where}: {name} has no effect: {' and '.join(self.switches)} are off")

    def describe(self, name: str) -> str:
        return f"read with {' and '.join(self.switches)}"

    def build_reference_rows(self) -> list[list[str]]:
        return [[f"`{self.step.key}`", f"read with {format_code(self.switches)}"]]


@dataclass(frozen=True)
class WindowSize(DeferredRule):
    """megatron-core's `[left, right]`: the keys visible before and after a token, −1 for all.

    Causal attention requires 0 on the right.
    """

    key: str = "window_size"
    farfield_key: str = "attention_window"
    resolve_order: ClassVar[int] = 1

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        value, where, path = setting.value, setting.where, (self.farfield_key,)
        if value is None:
            return
        is_pair = (
            isinstance(value, list) and len(value) == 2 and all(type(size) is int and size >= -1 for size in value)
        )
        if not is_pair or value[1] > 0:
            layers.problems.append(
                f"{where}: {name} is {quote_value(value)}; it must be [keys before a token, 0], or -1 for all of them"
            )
        elif not layers.is_replaced(name, setting, path):
            window = None if value[0] == -1 else value[0] + 1
            layers.values[path] = replace(setting, value=window)
            layers.notes.append(
                f"{where}: {name} {format_value(value)} sets {self.farfield_key} to {format_value(window)}"
            )

    def describes_model(self) -> bool:
        return True

    def describe(self, name: str) -> str:
        return f"[n, 0] sets {self.farfield_key} to n + 1 here"

    def build_reference_rows(self) -> list[list[str]]:
        return [[f"`{self.key}`", f"`{self.farfield_key}`: [n, 0] is n + 1, counting the token itself"]]


@dataclass(frozen=True)
class LayerFrequency(DeferredRule):
    """Key of megatron-core that turns one of our keys into a pattern of layers.

    The other value applies to every n-th layer, or to the layers with `marked` in a list.
    """

    key: str
    farfield_key: str
    other: Any
    """Value of our key in every n-th layer."""
    marked: int
    """List entry of a layer that has the other value."""
    needed: tuple[Any, ...] = ()
    """Values of our key that the rule accepts; all except null if empty."""
    divides: bool = False
    """True if n must divide the number of layers."""
    resolve_order: ClassVar[int] = 2

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        value, where, path = setting.value, setting.where, (self.farfield_key,)
        if value is None:
            return
        own, num_layers = layers.get_value(self.farfield_key), layers.get_value("num_layers")
        if problem := self._find_problem(value, own, num_layers):
            layers.problems.append(f"{where}: {name} {problem}")
            return
        if type(num_layers) is not int or own is None:  # a missing num_layers is reported elsewhere
            layers.notes.append(f"{where}: {name} has no effect: {self.farfield_key} is null")
            return
        pattern = [self.other if self._is_other(value, layer) else own for layer in range(num_layers)]
        layers.values[path] = replace(setting, value=pattern)
        layers.notes.append(f"{where}: {name} sets {self.farfield_key} to {format_value(find_period(pattern))} here")

    def _is_other(self, value: Any, layer: int) -> bool:
        return value[layer] == self.marked if isinstance(value, list) else (layer + 1) % value == 0

    def _find_problem(self, value: Any, own: Any, num_layers: Any) -> str | None:
        if isinstance(value, list):
            if any(type(mark) is not int or mark not in (0, 1) for mark in value):
                return f"is {format_value(value)}; a list must contain 0 or 1 for each layer"
            if type(num_layers) is int and len(value) != num_layers:
                return f"has {len(value)} {'entry' if len(value) == 1 else 'entries'}; num_layers is {num_layers}"
        elif type(value) is not int or value < 1:
            return f"is {quote_value(value)}; it must be a whole number of layers, or a list of 0 or 1 for each"
        elif self.divides and type(num_layers) is int and num_layers % value:
            return f"{value} does not divide num_layers {num_layers}"
        if isinstance(own, list):
            return f"contradicts {self.farfield_key}, which is a pattern of layers already; give one of them"
        if self.needed and own not in self.needed:
            needed = ", ".join(self.needed)
            return (
                f"applies to {self.farfield_key} {needed}, but it is {format_value(own)}; write {self.farfield_key} "
                "as a pattern of layers"
            )
        return None

    def describes_model(self) -> bool:
        return True

    def describe(self, name: str) -> str:
        return f"n sets {self.farfield_key} to {format_value(self.other)} in every n-th layer here"

    def build_reference_rows(self) -> list[list[str]]:
        other = format_value(self.other)
        return [
            [
                f"`{self.key}`",
                f"`{self.farfield_key}` as a pattern: {other} in every n-th layer, or in the layers that have "
                f"{self.marked} in a list",
            ]
        ]


@dataclass(frozen=True)
class AgreeingSwitches(NeoxRule):
    """Group of switches that must agree: all true mean one value of our key, all false another."""

    keys: tuple[str, ...]
    farfield_key: str
    on_value: Any
    off_value: Any
    why: str
    """Reason why different values are rejected."""
    is_suggested: ClassVar[bool] = True
    resolve_order: ClassVar[int] = 1

    def translate(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        layers.defer(name, setting)
        return iter(())

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        given = {key: layers.deferred[key] for key in self.keys if key in layers.deferred}
        if name != next(iter(given)):
            return  # handled once, for the first key
        for key, switch in given.items():
            if switch.value not in (None, True, False):
                layers.problems.append(
                    f"{switch.where}: {key} is {quote_value(switch.value)}; it must be true or false"
                )
                return
        is_on = {key: key in given and bool(given[key].value) for key in self.keys}
        names = " and ".join(self.keys)
        if len(set(is_on.values())) > 1:
            on, off = (next(key for key in self.keys if is_on[key] is state) for state in (True, False))
            layers.problems.append(
                f"{given[on].where}: {on}: true needs {off}: true: {self.why}; set both, or "
                f"{self.farfield_key}: {format_value(self.on_value)}"
            )
            return
        path, latest = (self.farfield_key,), max(given.values(), key=lambda switch: switch.layer)
        value = replace(latest, value=self.on_value if all(is_on.values()) else self.off_value)
        old = layers.values.get(path)
        if old is not None and old.layer == value.layer and old.value != value.value:
            layers.problems.append(
                f"{value.where}: {names} {format_value(latest.value)} contradict {self.farfield_key} "
                f"{format_value(old.value)} ({old.where})"
            )
            return
        if old is not None:
            layers.note_replaced(path, *((old, value) if value.layer > old.layer else (value, old)))
        if old is None or value.layer > old.layer:
            layers.values[path] = value
            layers.notes.append(
                f"{value.where}: {names} {format_value(latest.value)} are {self._describe(value.value)}"
            )

    def _describe(self, value: Any) -> str:
        return f"{self.farfield_key} {format_value(value)} here"

    def describes_model(self) -> bool:
        return is_model_key(self.farfield_key)

    def describe(self, name: str) -> str:
        others = " and ".join(key for key in self.keys if key != name)
        return f"together with {others} is {self._describe(self.on_value)}"

    def build_reference_rows(self) -> list[list[str]]:
        return [[format_code(self.keys), f"together: `{self.farfield_key}`, {self.on_value} or {self.off_value}"]]
