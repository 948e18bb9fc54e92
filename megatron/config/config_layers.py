"""Merging of configuration layers. Each key records where it was set, and which earlier value it replaced.

A layer is one file or the command line. Later layers override earlier ones. Within a layer a key has one value, even
under several names (`lr` and `optimizer.params.lr`); two different values are an error. Mappings merge key by key
across layers: `optimizer: {params: {lr: 1e-3}}` keeps the optimizer's other params. A layer that changes `pos_emb` or
`score_processor` drops the options of the previous method. Mutually exclusive keys (`REPLACED_KEYS`) also replace each
other: `train_epochs` on the command line replaces a file's `train_iters`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar, get_args

from megatron.config.schema import SECTIONS, KeyPath, list_config_keys, map_key_owners
from megatron.config.yaml_files import YamlDocument, describe_non_mapping, format_value, quote_value
from megatron.options.data import SPLITS, TASK_KEYS, TEXT_KEYS
from megatron.options.section import get_default
from megatron.utils.errors import UserError, quote_text, shorten_text
from megatron.utils.formatting import suggest_names

COMMAND_LINE = "command line"
PRECISION = ("precision",)
PRECISION_SWITCHES: dict[KeyPath, str] = {("fp16", "enabled"): "fp16", ("bf16", "enabled"): "bf16"}
FP16_TYPE = ("fp16", "type")
PRECISION_BY_FP16_TYPE = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16", "float16": "fp16"}
OPTION_KEYS = {
    ("pos_emb",): "pos_emb_options",
    ("score_processor",): "score_processor_options",
    ("attention_temperature",): "attention_temperature_options",
    ("task",): "task_options",
}
"""Keys that name a method, and the keys of its options."""

_SPLIT_PATHS = tuple(f"{split}_data_paths" for split in SPLITS)
_SPLIT_WEIGHTS = tuple(f"{split}_data_weights" for split in SPLITS)
REPLACED_KEYS: dict[str, tuple[str, ...]] = {
    "train_iters": ("train_epochs",),
    "train_epochs": ("train_iters",),
    "stages": ("train_iters", "train_epochs"),  # if the last stage has an end
    "finetune": ("rollback",),
    "rollback": ("finetune",),
    "warmup": ("lr_warmup_iters",),
    "lr_warmup_iters": ("warmup",),
    "data_path": (*_SPLIT_PATHS, *_SPLIT_WEIGHTS, "task", *TASK_KEYS),
    "train_data_paths": ("data_path", "task", *TASK_KEYS),
    "task": (*TEXT_KEYS, "seq_length"),
    "weight_by_num_documents": _SPLIT_WEIGHTS,
    **dict.fromkeys(_SPLIT_WEIGHTS, ("weight_by_num_documents",)),
}
"""Mutually exclusive keys. A layer that sets a key replaces the listed keys of earlier layers."""
ZERO_IS_GIVEN = ("warmup", "lr_warmup_iters")
"""Keys of `REPLACED_KEYS` for which zero is a value. For the others zero means unset."""


@dataclass(frozen=True)
class SourcedValue:
    """Value of a key and its origin: `file:line` or the command line."""

    value: Any
    where: str
    layer: int = 0


class KeyRule(ABC):
    """Rule for a key that is not ours."""

    is_suggested: ClassVar[bool] = False
    """True if a suggestion for a mistyped key may name the key."""
    resolve_order: ClassVar[int] = 0
    """Order among deferred rules; lower numbers are resolved first."""

    @abstractmethod
    def translate(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        """Yield our paths and values for the key while its layer is read; problems and notes go to `layers`."""

    def resolve(self, name: str, setting: SourcedValue, layers: ConfigLayers) -> None:
        """Change the merged `layers` for a key that `translate` has deferred."""
        raise NotImplementedError


class ValueRule(ABC):
    """Rule for a value of one of our keys that is not ours."""

    @abstractmethod
    def translate(self, path: KeyPath, setting: SourcedValue, layers: ConfigLayers) -> Iterator[tuple[KeyPath, Any]]:
        """Yield our paths and values for it; problems and notes go to `layers`."""


LEADING_KEY = re.compile(r"(?:[\w.]*\w(?=[ :,]))?")
"""Pattern for the word at the start of a message, which is a key if the message is about one, or nothing."""


def _to_underscores(name: str) -> str:
    return name.replace("-", "_")


def _flatten(
    values: dict[str, Any], document: YamlDocument, written_prefix: KeyPath = (), prefix: KeyPath = ()
) -> Iterator[tuple[KeyPath, SourcedValue]]:
    """Yield the leaves of a mapping as (path, setting).

    A nested mapping is opened only if the schema has keys inside it.

    written_prefix: path of the mapping as written in the file; prefix: the same path in the schema.
    """
    for name, value in values.items():
        written_path = (*written_prefix, name)
        path = (*prefix, *map(_to_underscores, name.split(".")))
        key = list_config_keys().get(path)
        if isinstance(value, dict) and key and (key.opens or key.allows_free_values):
            if key.allows_free_values:  # names inside belong to the method, so dashes stay
                for option, option_value in value.items():
                    yield (*path, option), SourcedValue(option_value, document.locate((*written_path, option)))
            else:
                yield from _flatten(value, document, written_path, path)
        else:
            yield path, SourcedValue(value, document.locate(written_path))


def _excludes_others(name: str, value: Any) -> bool:
    """Return True if a value of a key in `REPLACED_KEYS` excludes the listed keys."""
    if name == "stages":
        last = value[-1] if isinstance(value, list) and value else None
        return isinstance(last, dict) and not {"until", "until_tokens"}.isdisjoint(last)
    return bool(value) or (name in ZERO_IS_GIVEN and value is not None)


def _get_default_of_null(path: KeyPath) -> Any:
    """Return the default of a key whose values exclude null, or None if the key allows null or has no default.

    `key: null` in a file sets this default; on the command line it unsets the key.
    """
    key = list_config_keys().get(path)
    if key is None or key.field.is_required() or NoneType in get_args(key.field.annotation):
        return None
    return key.field.get_default(call_default_factory=True)


@dataclass
class ConfigLayers:
    """Merged layers. `problems` are errors; `notes` are shown when a command starts. Each has one line.

    `replacements` list which value replaced which, one line each. Overrides are normal, so only a dry run shows them.

    `key_rules` and `value_rules` (by key and value) translate the keys and values of other projects.
    """

    key_rules: Mapping[str, KeyRule] = field(default_factory=dict)
    value_rules: Mapping[str, Mapping[str, ValueRule]] = field(default_factory=dict)
    values: dict[KeyPath, SourcedValue] = field(default_factory=dict)
    deferred: dict[str, SourcedValue] = field(default_factory=dict)
    """Keys that have a meaning only together with another key (`rotary_pct`)."""
    notes: list[str] = field(default_factory=list)
    replacements: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_layers: int = 0
    has_foreign_keys: bool = False
    """True if a layer has keys of another project."""
    _ignored: dict[str, list[str]] = field(default_factory=dict)
    """Keys of the current layer that have no effect, by reason."""

    def add_file(self, document: YamlDocument) -> None:
        """Add a file on top."""
        self._add(_flatten(document.values, document), document.source)

    def add_overrides(self, overrides: Iterable[tuple[str, Any]]) -> None:
        """Add `key=value` pairs on top. If a key is given twice, the later one wins, with a note."""
        pairs: dict[str, Any] = {}
        for name, value in overrides:
            name = _to_underscores(name)
            if name in pairs:
                self.notes.append(
                    f"{name} {format_value(pairs[name])} replaced by {format_value(value)} ({COMMAND_LINE}, given "
                    f"twice)"
                )
            pairs[name] = value
        self._add(_flatten(pairs, YamlDocument(COMMAND_LINE, pairs, {})), COMMAND_LINE)

    def locate(self, path: KeyPath) -> str | None:
        """Return where a key was set, or else a key inside or around it."""
        if path in self.values:
            return self.values[path].where
        nested = (setting.where for key, setting in self.values.items() if key[: len(path)] == path)
        around = self.locate(path[:-1]) if len(path) > 1 else None
        return next(nested, around)

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Prefix errors about a key with the file and line that set it.

        The key is that of the error, or the one with which its message begins.
        """
        try:
            yield
        except UserError as error:
            key = error.key or LEADING_KEY.match(str(error))[0]  # type: ignore[index]
            where = self.locate(tuple(key.split("."))) if key else None
            raise (UserError(f"{where}: {error}") if where else error) from None

    def get_value(self, key: str) -> Any:
        """Return the value of a flat key, or its default if no layer sets it."""
        setting = self.values.get((key,))
        return setting.value if setting else get_default(SECTIONS[map_key_owners()[key]], key)

    def defer(self, name: str, setting: SourcedValue) -> None:
        """Defer a key until `resolve_deferred`."""
        old = self.deferred.get(name)
        if old is not None:
            self.note_replaced((name,), old, setting)
        self.deferred[name] = SourcedValue(setting.value, setting.where, self.num_layers)

    def resolve_deferred(self) -> None:
        """Resolve all deferred keys by their rules on the merged layers."""
        for name in sorted(self.deferred, key=lambda name: self.key_rules[name].resolve_order):
            self.key_rules[name].resolve(name, self.deferred[name], self)

    def drop_alternatives(self) -> None:
        """Drop keys that a key of a later layer excludes, starting with the last layer.

        Dropped keys exclude nothing.
        """
        given = [path for path in self.values if path[0] in REPLACED_KEYS and len(path) == 1]
        for path in sorted(given, key=lambda path: -self.values[path].layer):
            new = self.values.get(path)
            if new is None or not _excludes_others(path[0], new.value):
                continue
            for other in [other for other in self.values if other[0] in REPLACED_KEYS[path[0]]]:
                if (old := self.values[other]).layer < new.layer:
                    del self.values[other]
                    self.replacements.append(
                        f"{'.'.join(other)} {format_value(old.value)} ({old.where}) replaced by {path[0]} "
                        f"{format_value(new.value)} ({new.where})"
                    )

    def is_replaced(self, name: str, setting: SourcedValue, path: KeyPath) -> bool:
        """Return True if a later layer's `path` replaces another project's key of the same meaning.

        If one layer sets both, that is a problem.
        """
        other = self.values.get(path)
        if other is None:
            return False
        farfield_key = ".".join(path)
        if other.layer == setting.layer:
            self.problems.append(
                f"{setting.where}: {name} contradicts {farfield_key} ({other.where}); give one of them"
            )
            return True
        old, new = (setting, other) if other.layer > setting.layer else (other, setting)
        names = (name, farfield_key) if old is setting else (farfield_key, name)
        self.replacements.append(
            f"{names[0]} {format_value(old.value)} ({old.where}) replaced by {names[1]} {format_value(new.value)} "
            f"({new.where})"
        )
        return old is setting

    def note_ignored(self, name: str, reason: str) -> None:
        """Record that a key of the current layer has no effect, grouped by reason."""
        self._ignored.setdefault(reason, []).append(name)

    def note_replaced(self, path: KeyPath, old: SourcedValue, new: SourcedValue) -> None:
        """Record that one value replaces another, if they differ."""
        if old.value != new.value:
            self.replacements.append(
                f"{'.'.join(path)} {format_value(old.value)} ({old.where}) replaced by {format_value(new.value)} "
                f"({new.where})"
            )

    def _add(self, items: Iterable[tuple[KeyPath, SourcedValue]], source: str) -> None:
        self.num_layers += 1
        self._ignored = {}
        layer: dict[KeyPath, SourcedValue] = {}
        written: dict[KeyPath, str] = {}
        for path, setting in items:
            is_repeated = path in written
            if is_repeated:  # num-layers and num_layers, or optimizer.params.lr and optimizer: {params: {lr: …}}
                self.problems.append(f"{setting.where}: {'.'.join(path)} is given twice; see {written[path]}")
            written[path] = setting.where
            for own_path, value in self._translate(path, setting):
                old = layer.get(own_path)
                if old is not None and old.value != value and not is_repeated:
                    self.problems.append(
                        f"{setting.where}: {'.'.join(own_path)} {format_value(value)} contradicts "
                        f"{format_value(old.value)} ({old.where})"
                    )
                layer[own_path] = SourcedValue(value, setting.where, self.num_layers)
        for reason, names in self._ignored.items():
            have = "has" if len(names) == 1 else "have"
            self.notes.append(f"{source}: {', '.join(names)} {have} no effect: {reason}")
        self._resolve_precision(layer)
        for method_path, options_key in OPTION_KEYS.items():
            self._drop_options(method_path, options_key, layer)
        for path, setting in layer.items():
            old, default = self.values.get(path), _get_default_of_null(path) if setting.value is None else None
            if default is not None and setting.where == COMMAND_LINE:
                self._unset(path)
                continue
            if default is not None:
                setting = SourcedValue(default, setting.where, setting.layer)
            if old is not None:
                self.note_replaced(path, old, setting)
            self.values[path] = setting

    def _translate(self, path: KeyPath, setting: SourcedValue) -> Iterator[tuple[KeyPath, Any]]:
        """Yield our paths and values for one written key; record problems and notes."""
        name = ".".join(path)
        if (rule := self.key_rules.get(name)) is not None:
            self.has_foreign_keys = True
            return rule.translate(name, setting, self)
        return self.translate_farfield_key(path, setting)

    def translate_farfield_key(self, path: KeyPath, setting: SourcedValue) -> Iterator[tuple[KeyPath, Any]]:
        """Yield paths and values for one of our keys, or an unknown one; translate other projects' names of values."""
        name, value, where = ".".join(path), setting.value, setting.where
        key = list_config_keys().get(path)
        parent = list_config_keys().get(path[:-1])
        if path == FP16_TYPE:
            if isinstance(value, str) and value in PRECISION_BY_FP16_TYPE:
                yield path, value
            else:
                choices = ", ".join(PRECISION_BY_FP16_TYPE)
                self.problems.append(f"{where}: {name} is {format_value(value)}; choose from {choices}")
            return
        if key is None and not (parent and parent.allows_free_values):
            self.problems.append(f"{where}: {self._describe_unknown_key(path, value)}")
            return
        if key is not None and (key.opens or key.allows_free_values):
            is_switch = any(path == switch[:1] for switch in PRECISION_SWITCHES)  # `precision` is the key to unset
            if value is None and where == COMMAND_LINE and not is_switch:
                self._unset_inside(path)
            elif not isinstance(value, dict):
                self.problems.append(f"{where}: {name} {describe_non_mapping(value)}")
            return  # an empty mapping has no effect
        rule = self.value_rules.get(name, {}).get(value) if isinstance(value, str) else None
        if rule is None:
            yield path, value
        else:
            yield from rule.translate(path, setting, self)

    def _unset_inside(self, path: KeyPath) -> None:
        """Unset the keys inside a mapping that earlier layers set."""
        for inner in [inner for inner in self.values if inner[: len(path)] == path]:
            self._unset(inner, f" by {'.'.join(path)} null")

    def _unset(self, path: KeyPath, cause: str = "") -> None:
        """Unset a key from the command line, as if no earlier layer had set it."""
        if (old := self.values.pop(path, None)) is not None:
            self.replacements.append(
                f"{'.'.join(path)} {format_value(old.value)} ({old.where}) unset{cause} ({COMMAND_LINE})"
            )

    def _resolve_precision(self, layer: dict[KeyPath, SourcedValue]) -> None:
        """Combine a layer's `precision`, `fp16` and `bf16` into one `precision`.

        A layer that enables one format disables the other, so that an overlay can change the precision of a model file.
        Enabling both in one layer is an error. KERPLE writes bfloat16 as `fp16: {type: bfloat16}`.
        """
        fp16_type = layer.pop(FP16_TYPE, None)
        settings = {path: layer[path] for path in layer if path == PRECISION or path in PRECISION_SWITCHES}
        for path in settings:
            if path in PRECISION_SWITCHES:
                layer.pop(path)
        choices: dict[str, tuple[str, SourcedValue]] = {}
        for path, setting in settings.items():
            if path == PRECISION and isinstance(setting.value, str):
                choices.setdefault(setting.value, (f"precision {setting.value}", setting))
            elif path in PRECISION_SWITCHES and setting.value is True:
                name = PRECISION_SWITCHES[path]
                if name == "fp16" and fp16_type is not None:
                    name = PRECISION_BY_FP16_TYPE[fp16_type.value]
                choices.setdefault(name, (f"{'.'.join(path)} true", setting))
            elif path in PRECISION_SWITCHES and not isinstance(setting.value, bool):
                self.problems.append(
                    f"{setting.where}: {'.'.join(path)} is {quote_value(setting.value)}; it must be true or false"
                )
        if len(choices) > 1:
            (first_text, first), (second_text, second), *_ = choices.values()
            self.problems.append(
                f"{second.where}: {second_text} contradicts {first_text} ({first.where}); choose one precision"
            )
        elif choices:
            ((value, (_, setting)),) = choices.items()
            layer[PRECISION] = SourcedValue(value, setting.where, setting.layer)
        else:
            current = self.values.get(PRECISION)
            for path, setting in settings.items():
                precision = PRECISION_SWITCHES.get(path)
                if precision and setting.value is False and current and current.value == precision:
                    layer[PRECISION] = SourcedValue("fp32", setting.where, setting.layer)

    def _drop_options(self, method_path: KeyPath, options_key: str, layer: dict[KeyPath, SourcedValue]) -> None:
        new, old = layer.get(method_path), self.values.get(method_path)
        if new is None or old is None or new.value == old.value:
            return
        for path in [path for path in self.values if path[0] == options_key]:
            dropped, owner = self.values.pop(path), format_value(old.value)
            self.notes.append(
                f"{'.'.join(path)} {format_value(dropped.value)} ({dropped.where}) dropped: it belongs to {owner}"
            )

    def _describe_unknown_key(self, path: KeyPath, given: Any) -> str:
        """Describe an unknown key, for example `unknown key 'num_layrs'; did you mean num_layers?`.

        given: value of the key, for the form to write.
        """
        name = ".".join(path)
        if (parent := list_config_keys().get(path[:-1])) is not None and parent.takes_mapping:
            form = f"'{{{path[-1]}: {format_value(given)}}}'"
            return f"unknown key {quote_text(name)}; {parent.name} is set as a whole: {parent.name}={form}"
        if path == ("sweep",):
            return "sweep: use `./deepy.py sweep` to run a file with this section"
        key, _, value = path[-1].partition(":")
        if value:
            spaced = shorten_text(f"{{{key}: {value}}}")
            return f"unknown key {quote_text(name)}; YAML needs a space after the colon: {spaced}"
        siblings = {key[-1]: ".".join(key) for key in list_config_keys() if key[:-1] == path[:-1]}
        if len(path) == 1:
            siblings |= {key: key for key, rule in self.key_rules.items() if rule.is_suggested}
        all_names = [".".join(key) for key in list_config_keys()]
        elsewhere = [other for other in all_names if other.split(".")[-1] == path[-1]]  # a bare `stage`, or `params.lr`
        here = [siblings[key] for key in siblings if key.rstrip("s") == path[-1].rstrip("s")]  # `harness.task`
        hint = f"did you mean {' or '.join([*here, *elsewhere])}?" if elsewhere else ""
        hint = hint or suggest_names(path[-1], siblings, max_suggestions=2, shown=siblings)
        if not hint and parent is not None and parent.opens:  # its name makes all names inside similar
            hint = f"{parent.name} has {', '.join(siblings)}"
        hint = hint or suggest_names(name, all_names)
        return f"unknown key {quote_text(name)}; {hint or '`./deepy.py keys` lists all keys'}"
