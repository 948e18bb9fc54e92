"""Merging: layers of keys, each key with the place that set it; later wins and says what it replaced.

A layer is one file or the command line. Within a layer every key has one value, whatever names it is written under
(`lr` and `optimizer.params.lr`): two that differ contradict each other, in either order. Between layers mappings merge
key by key (`optimizer: {params: {lr: 1e-3}}` leaves the optimizer's other params alone). Choosing another `pos_emb` or
`score_processor` drops the options that earlier layers set for the one it replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.config import neox
from megatron.config.schema import Path_, list_config_keys
from megatron.config.yaml_files import YamlDocument
from megatron.utils.suggestions import suggest_names

COMMAND_LINE = "command line"
PRECISION = ("precision",)
ENABLED = {("fp16", "enabled"): "fp16", ("bf16", "enabled"): "bf16"}
FP16_TYPE = ("fp16", "type")
FP16_TYPES = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16", "float16": "fp16"}
CHOOSERS = {
    ("pos_emb",): "pos_emb_options",
    ("score_processor",): "score_processor_options",
    ("task",): "task_options",
}


@dataclass(frozen=True)
class SourcedValue:
    """A value and who set it: `file:line` or the command line."""

    value: Any
    where: str
    layer: int = 0


def format_value(value: Any) -> str:
    """A value as it would be written in YAML, short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    return str(value)


def _normal(name: str) -> str:
    return name.replace("-", "_")


def _flatten(
    values: dict[str, Any], document: YamlDocument, at: Path_ = (), out: Path_ = ()
) -> Iterator[tuple[Path_, SourcedValue]]:
    """Leaves of a mapping as (path, setting); a mapping opens only where the schema has keys inside it."""
    for name, value in values.items():
        here = (*at, name)
        path = (*out, *map(_normal, name.split(".")))
        key = list_config_keys().get(path)
        if isinstance(value, dict) and key and (key.opens or key.allows_free_values):
            if key.allows_free_values:  # the names inside are the method's, not ours: no dashes to translate
                for option, inner in value.items():
                    yield (*path, option), SourcedValue(inner, document.locate((*here, option)))
            else:
                yield from _flatten(value, document, here, path)
        else:
            yield path, SourcedValue(value, document.locate(here))


@dataclass
class ConfigLayers:
    """What the layers say together. `problems` are errors, one line each; `notes` are worth a line at the start."""

    values: dict[Path_, SourcedValue] = field(default_factory=dict)
    options: dict[str, SourcedValue] = field(default_factory=dict)
    """Other projects' keys that mean something only together with another key (`rotary_pct`), settled at the end."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    layers: int = 0

    def add_file(self, document: YamlDocument) -> None:
        """Put a file on top."""
        self._add(_flatten(document.values, document), document.source)

    def add_overrides(self, overrides: Iterable[tuple[str, Any]]) -> None:
        """Put `key=value` pairs on top; of a key given twice the later one counts, with a note."""
        pairs: dict[str, Any] = {}
        for name, value in overrides:
            name = _normal(name)
            if name in pairs:
                self.notes.append(
                    f"{name} {format_value(pairs[name])} replaced by {format_value(value)} ({COMMAND_LINE}, given "
                    f"twice)"
                )
            pairs[name] = value
        self._add(_flatten(pairs, YamlDocument(COMMAND_LINE, pairs, {})), COMMAND_LINE)

    def locate(self, path: Path_) -> str | None:
        """Who set a key, or the nearest thing to it."""
        if path in self.values:
            return self.values[path].where
        inside = [setting.where for known, setting in self.values.items() if known[: len(path)] == path]
        return inside[0] if inside else None

    def _add(self, items: Iterable[tuple[Path_, SourcedValue]], source: str) -> None:
        self.layers += 1
        layer: dict[Path_, SourcedValue] = {}
        ignored: dict[str, list[str]] = {}
        written: dict[Path_, str] = {}
        for path, setting in items:
            twice = path in written
            if twice:  # num-layers and num_layers, or optimizer.params.lr and optimizer: {params: {lr: …}}
                self.problems.append(f"{setting.where}: {'.'.join(path)} is given twice, see {written[path]}")
            written[path] = setting.where
            for new_path, value in self._translate(path, setting, ignored):
                new = SourcedValue(value, setting.where, self.layers)
                old = layer.get(new_path)
                if old is not None and old.value != value and not twice:
                    name = ".".join(new_path)
                    self.problems.append(
                        f"{setting.where}: {name} {format_value(value)} contradicts {format_value(old.value)} "
                        f"({old.where})"
                    )
                layer[new_path] = new
        for reason, names in ignored.items():
            have = "has" if len(names) == 1 else "have"
            self.notes.append(f"{source}: {', '.join(names)} {have} no effect: {reason}")
        self._resolve_precision(layer)
        for chooser, options in CHOOSERS.items():
            self._drop_options(chooser, options, layer)
        for path, setting in layer.items():
            self._put(path, setting)

    def _put(self, path: Path_, setting: SourcedValue) -> None:
        old = self.values.get(path)
        if old is not None and old.value != setting.value:
            self.notes.append(
                f"{'.'.join(path)} {format_value(old.value)} ({old.where}) replaced by {format_value(setting.value)} "
                f"({setting.where})"
            )
        self.values[path] = setting

    def _translate(
        self, path: Path_, setting: SourcedValue, ignored: dict[str, list[str]]
    ) -> Iterator[tuple[Path_, Any]]:
        """Our paths and values for one written key; problems and notes are recorded."""
        name, value, where = ".".join(path), setting.value, setting.where
        rule = neox.RULES.get(name)
        match rule:
            case None:
                yield from self._to_own_key(path, setting)
            case neox.Alias():
                if rule.switch is not None:
                    if value is not None and not isinstance(value, bool):
                        self.problems.append(f"{where}: {name} is {format_value(value)}; it must be true or false")
                        return
                    on, off = rule.switch
                    setting = SourcedValue(on if value else off, where, setting.layer)
                if rule.more and type(value) is int:
                    setting = SourcedValue(value + rule.more, where, setting.layer)
                more = f" - {rule.more}" if rule.more else ""
                self.notes.append(f"{where}: {name} is {rule.to}{more} here")
                yield from self._to_own_key(tuple(rule.to.split(".")), setting)
            case neox.MethodOptionAlias() | neox.FractionOf() | neox.ValueSwitch() | neox.ValidatedNoop():
                old = self.options.get(name)
                if old is not None and old.value != value:
                    self.notes.append(
                        f"{name} {format_value(old.value)} ({old.where}) replaced by {format_value(value)} ({where})"
                    )
                self.options[name] = SourcedValue(value, where, self.layers)
            case neox.Ignored():
                ignored.setdefault(rule.reason, []).append(name)
            case neox.Unsupported():
                if value not in rule.harmless:
                    self.problems.append(f"{where}: {name}: {format_value(value)} is refused: {rule.instead}")

    def _to_own_key(self, path: Path_, setting: SourcedValue) -> Iterator[tuple[Path_, Any]]:
        """A key of ours (or an unknown one), with other projects' names of its values."""
        name, value, where = ".".join(path), setting.value, setting.where
        key = list_config_keys().get(path)
        parent = list_config_keys().get(path[:-1])
        if path == FP16_TYPE:
            if isinstance(value, str) and value in FP16_TYPES:
                yield path, value
            else:
                self.problems.append(f"{where}: {name} is {format_value(value)}; choose from {', '.join(FP16_TYPES)}")
            return
        if key is None and not (parent and parent.allows_free_values):
            self.problems.append(f"{where}: {describe_unknown_key(path)}")
            return
        if key is not None and (key.opens or key.allows_free_values) and not isinstance(value, dict):
            self.problems.append(f"{where}: {name} is {format_value(value)}; it must be a mapping of keys to values")
            return
        if key is not None and (key.opens or key.allows_free_values):
            return  # an empty mapping says nothing
        if not isinstance(value, str):
            yield path, value
        elif name == "pos_emb" and value in neox.POSITION_ALIASES:
            alias = neox.POSITION_ALIASES[value]
            meaning = alias.encoding + (f" with score_processor {alias.processor}" if alias.processor else "")
            meaning += ", pos_emb_per_layer: true" if alias.per_layer else ""
            meaning += "".join(
                f", pos_emb_options.{key}: {format_value(given)}" for key, given in alias.options.items()
            )
            self.notes.append(f"{where}: pos_emb {value} is {meaning} here")
            yield from alias.keys().items()
        elif value in neox.ADVICE.get(name, {}):
            self.problems.append(f"{where}: {name}: {value} is not offered; {neox.ADVICE[name][value]}")
        else:
            yield path, neox.VALUES.get(name, {}).get(value, value)

    def _resolve_precision(self, layer: dict[Path_, SourcedValue]) -> None:
        """Make one `precision` of what a layer says in `precision`, `fp16` and `bf16`.

        A layer that switches one format on switches the other off, so that an overlay can change the precision of a
        model file; both in one layer contradict each other. KERPLE writes bfloat16 as `fp16: {type: bfloat16}`.
        """
        kind = layer.pop(FP16_TYPE, None)
        said = {path: setting for path, setting in layer.items() if path == PRECISION or path in ENABLED}
        for path in said:
            if path in ENABLED:
                layer.pop(path)
        on: dict[str, tuple[str, SourcedValue]] = {}
        for path, setting in said.items():
            if path == PRECISION and isinstance(setting.value, str):
                on.setdefault(setting.value, (f"precision {setting.value}", setting))
            elif path in ENABLED and setting.value is True:
                name = ENABLED[path]
                if name == "fp16" and kind is not None:
                    name = FP16_TYPES[kind.value]
                on.setdefault(name, (f"{'.'.join(path)} true", setting))
            elif path in ENABLED and not isinstance(setting.value, bool):
                self.problems.append(
                    f"{setting.where}: {'.'.join(path)} is {format_value(setting.value)}; it must be true or false"
                )
        if len(on) > 1:
            (first, one), (second, two), *_ = on.values()
            self.problems.append(f"{two.where}: {second} contradicts {first} ({one.where}); choose one precision")
        elif on:
            ((value, (_, setting)),) = on.items()
            layer[PRECISION] = SourcedValue(value, setting.where, setting.layer)
        else:
            current = self.values.get(PRECISION)
            for path, setting in said.items():
                if path in ENABLED and setting.value is False and current and current.value == ENABLED[path]:
                    layer[PRECISION] = SourcedValue("fp32", setting.where, setting.layer)

    def _drop_options(self, chooser: Path_, options: str, layer: dict[Path_, SourcedValue]) -> None:
        new, old = layer.get(chooser), self.values.get(chooser)
        if new is None or old is None or new.value == old.value:
            return
        for path in [path for path in self.values if path[0] == options]:
            gone = self.values.pop(path)
            self.notes.append(
                f"{'.'.join(path)} {format_value(gone.value)} ({gone.where}) dropped: it belongs to {old.value}"
            )


def describe_unknown_key(path: Path_) -> str:
    """`unknown key 'num_layrs'; did you mean num_layers?`"""
    name = ".".join(path)
    if path == ("sweep",):
        return "sweep: files that hold one are for `./deepy.py sweep`"
    siblings = {key[-1]: ".".join(key) for key in list_config_keys() if key[:-1] == path[:-1]}
    if len(path) == 1:
        siblings |= {
            key: key for key, rule in neox.RULES.items() if isinstance(rule, neox.Alias | neox.MethodOptionAlias)
        }
    everywhere = [".".join(key) for key in list_config_keys()]
    same = [other for other in everywhere if other.split(".")[-1] == path[-1]]  # a bare `stage`, or `params.lr`
    hint = f"did you mean {' or '.join(same)}?" if same else ""
    hint = hint or suggest_names(path[-1], siblings, max_suggestions=2, cutoff=0.63, shown=siblings)
    hint = hint or suggest_names(name, everywhere, cutoff=0.8) or "`./deepy.py keys` lists all keys"
    return f"unknown key {name!r}; {hint}"
