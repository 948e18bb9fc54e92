"""Frozen `Config` of all sections.

The keys of a YAML file are flat: `num_layers: 12`. Every key belongs to exactly one section, which follows from its
name. Only optimizer, zero_optimization, fp16, bf16, slurm and the `…_options` of methods contain keys of their own.

Errors of pydantic become one line with the origin of the key, its name, its value and valid values.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from megatron.config.yaml_files import dump_yaml, format_value, parse_scalar, quote_value
from megatron.options.data import DataOptions
from megatron.options.launch import LaunchOptions
from megatron.options.model import ModelOptions
from megatron.options.optimizer import OptimizerOptions
from megatron.options.output import CheckpointOptions, LoggingOptions
from megatron.options.position import PositionOptions
from megatron.options.section import ChangePolicy, ConfigSection, list_accepted_names, read_docstring
from megatron.options.training import BATCH_SIZES, TrainingOptions
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import UserError, quote_text
from megatron.utils.field_errors import BOUND_MESSAGES, EXPECTED_TYPES, describe_requirement, name_location
from megatron.utils.formatting import format_choices

KeyPath = tuple[str, ...]

CONFIG_FILE = "config.yml"
"""Name of the configuration that a run saves in its folder and in its checkpoints."""

_ABSENT = object()


class Config(BaseModel):
    """Complete configuration of a run. Sections are attributes; `to_flat()` returns the flat keys of a YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: ModelOptions
    position: PositionOptions
    data: DataOptions
    training: TrainingOptions
    optimizer: OptimizerOptions
    logging: LoggingOptions
    checkpoint: CheckpointOptions
    launch: LaunchOptions

    @staticmethod
    def from_flat(flat: Mapping[str, Any]) -> Config:
        """Build a configuration from flat keys and values; absent keys have their defaults.

        Raises:
            pydantic.ValidationError: for a value of the wrong type; KeyError for an unknown key.
        """
        sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, value in flat.items():
            sections[map_key_owners()[key]][key] = value
        return Config.model_validate(sections)

    def to_flat(self) -> dict[str, Any]:
        """Return all keys and values as in a YAML file, in the order of the sections."""
        return {key: value for section in self.model_dump().values() for key, value in section.items()}

    def replace(self, **keys: Any) -> Config:
        """Return a validated copy with some flat keys changed. Unchanged sections are the same objects.

        Raises:
            pydantic.ValidationError: for a value of the wrong type; KeyError for an unknown key.
        """
        changed: dict[str, dict[str, Any]] = {}
        for key, value in keys.items():
            changed.setdefault(map_key_owners()[key], {})[key] = value
        sections: dict[str, Any] = {name: getattr(self, name) for name in SECTIONS}
        for name, values in changed.items():
            sections[name] = sections[name].model_dump(exclude_unset=True) | values
        return Config.model_validate(sections)

    def get_keys_by_policy(self, *policies: ChangePolicy, defaults: bool = True) -> dict[str, Any]:
        """Return the keys of some policies with their values; nested keys have dotted names.

        defaults: include keys that have their default.
        """
        sections = self.model_dump(exclude_defaults=not defaults)
        values = {}
        for path, key in list_config_keys().items():
            if key.policy in policies:
                value: Any = sections.get(key.section, {})
                for name in path:
                    value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
                if value is not _ABSENT:
                    values[key.name] = value
        return values

    def get_architecture_keys(self) -> dict[str, Any]:
        """Return the keys that determine which function the trained weights compute.

        A resumed run must agree in all of them.
        """
        return self.get_keys_by_policy("architecture", "context")

    def get_training_fingerprint(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return the keys that decide the training; runs that agree in them differ by rounding only.

        defaults: include keys that have their default.
        """
        policies: tuple[ChangePolicy, ...] = (
            "architecture", "context", "initialization", "data", "numerics", "schedule"
        )  # fmt: skip
        return self.get_keys_by_policy(*policies, defaults=defaults)

    def compute_training_digest(self, **circumstances: Any) -> str:
        """Return a hash of the training without its seed. Runs with equal digests differ only in their seeds.

        Defaults are left out, so that adding a key changes no existing digest.

        circumstances: facts outside the configuration that decide the training; None is left out.
        """
        keys = {key: value for key, value in self.get_training_fingerprint(defaults=False).items() if key != "seed"}
        return compute_keys_digest(keys | {name: fact for name, fact in circumstances.items() if fact is not None})

    def to_yaml(self, *, only_set: bool = False) -> str:
        """Return the configuration as YAML with a heading for each section.

        Batch sizes that are neither given nor resolved are left out: a default would contradict the others.

        only_set: leave out keys that were not given.
        """
        parts = []
        for name, values in self.model_dump(exclude_unset=only_set).items():
            if name == "training":
                unsettled = set(BATCH_SIZES) - self.training.model_fields_set
                values = {key: value for key, value in values.items() if key not in unsettled}
            if not values:
                continue
            title = read_docstring(SECTIONS[name]).partition("\n")[0]
            parts.append(f"# {name}: {title}\n{dump_yaml(values)}")
        return "\n".join(parts)

    def save(self, path: str | Path) -> None:
        """Write the configuration atomically.

        Raises:
            UserError: no permission to write; RunError if writing fails.
        """
        write_text_atomically(path, self.to_yaml())


SECTIONS: dict[str, type[ConfigSection]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Config.model_fields.items()
}


@dataclass(frozen=True)
class ConfigKey:
    """One key of the YAML file; a nested key has a path."""

    path: KeyPath
    section: str
    field: FieldInfo
    opens: type[ConfigSection] | None
    """Nested section that the key opens, or None."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def doc(self) -> str:
        return self.field.description or ""

    @property
    def policy(self) -> ChangePolicy | None:
        """Policy of the key; None if it opens a nested section."""
        extra = self.field.json_schema_extra
        return extra.get("policy") if isinstance(extra, dict) else None  # type: ignore[return-value]

    @property
    def allows_free_values(self) -> bool:
        """True if the key contains a mapping with names of its own (`pos_emb_options`)."""
        return get_origin(self.field.annotation) is dict

    @property
    def takes_mapping(self) -> bool:
        """True if a value of the key may be a mapping."""
        return any(get_origin(each) is dict for each in (self.field.annotation, *get_args(self.field.annotation)))

    @property
    def max_value(self) -> float:
        """Maximum value of the key; infinite if it has none."""
        return next((bound.le for bound in self.field.metadata if hasattr(bound, "le")), math.inf)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Valid values of the key; empty if they cannot be listed."""
        annotations = (self.field.annotation, *get_args(self.field.annotation))
        return tuple(value for a in annotations if str(get_origin(a)) == "typing.Literal" for value in get_args(a))


def _iter_keys(section: str, model: type[ConfigSection], prefix: KeyPath = ()) -> Iterator[ConfigKey]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        opens = annotation if isinstance(annotation, type) and issubclass(annotation, ConfigSection) else None
        yield ConfigKey((*prefix, name), section, field, opens)
        if opens:
            yield from _iter_keys(section, opens, (*prefix, name))


@cache
def list_config_keys() -> dict[KeyPath, ConfigKey]:
    """Return every key by its path, in the order of the documentation."""
    keys: dict[KeyPath, ConfigKey] = {}
    for section, model in SECTIONS.items():
        for key in _iter_keys(section, model):
            if key.path in keys:
                raise TypeError(f"key {key.name} has two owners: {keys[key.path].section} and {section}")
            if (key.policy is None) != (key.opens is not None):
                raise TypeError(f"key {key.name} needs a policy, or, if it opens a section, none")
            keys[key.path] = key
    return keys


@cache
def map_key_owners() -> dict[str, str]:
    """Map each flat key to its section."""
    return {path[0]: key.section for path, key in list_config_keys().items()}


def compute_keys_digest(keys: Mapping[str, Any]) -> str:
    """Return a hash of the keys that decide a training, in any order."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()


SectionT = TypeVar("SectionT", bound=ConfigSection)

PLAIN_TYPES: dict[str, type | tuple[type, ...]] = {
    "int_type": int, "float_type": (int, float), "finite_number": (int, float), "bool_type": bool,
}  # fmt: skip
"""Types of the values that an error of pydantic asks for, if a string may be one of them in quotes."""
WITHOUT_QUOTES = ", without quotes"
MAPPING_KEY = "[key]"
"""Last part of an error's location if the key of a mapping is invalid."""


UNION_MEMBER = re.compile(r"(constrained-)?(int|float|str|bool)|(literal|list|dict)\[.*\]|function-.*")
"""Suffix that pydantic appends to an error's location if a value may have several types."""


def _is_not_finite(value: Any) -> bool:
    """Return True for infinity and NaN, also as strings from the command line."""
    try:
        return not isinstance(value, int) and not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _is_quoted(value: str, error_type: str) -> bool:
    """Return True if a string is a value of the expected type in quotes, such as '2'."""
    try:
        plain = parse_scalar(value, "value")
    except UserError:
        return False
    expected = PLAIN_TYPES.get(error_type)
    return expected is not None and isinstance(plain, expected) and isinstance(plain, bool) == (expected is bool)


def _format_invalid_value(error: dict[str, Any]) -> str:
    """Format a value, with a string in quotes if its type is the fault."""
    is_choice_of_numbers = error["type"] == "literal_error" and "'" not in error["ctx"]["expected"]
    # The command-line library reports `…_parsing`: its values are always strings.
    is_wrong_type = error["type"].endswith("_type") or is_choice_of_numbers
    return quote_value(error["input"]) if is_wrong_type else format_value(error["input"])


def _list_valid_values(error: dict[str, Any], key: ConfigKey | None) -> str:
    error_type, context = error["type"], error.get("ctx", {})
    if error_type in EXPECTED_TYPES:
        value = error["input"]
        if error_type == "float_type" and _is_not_finite(value):
            return "it must be a finite number"  # `lr=nan` on the command line, which YAML reads as a string
        text = describe_requirement(error)
        if isinstance(value, str) and _is_quoted(value, error_type):
            return text + WITHOUT_QUOTES
        if isinstance(value, float) and value.is_integer() and EXPECTED_TYPES[error_type] == "an integer":
            if key is not None and value > key.max_value:
                return f"{text} of at most {key.max_value}"
            text += f", written {int(value)}"
        if error_type == "list_type" and key is not None and isinstance(value, str | int | float):
            text += f", written [{format_value(value)}]"
        return text
    if error_type in BOUND_MESSAGES and _is_not_finite(error["input"]):
        return "it must be a finite number"  # every bound is also violated by NaN
    if error_type == "literal_error":
        # pydantic formats them as 'a', 'b' or 'c'
        expected = str(context.get("expected")).replace(" or ", ", ").replace("'", "")
        choices = [format_value(choice) for choice in key.choices] if key else expected.split(", ")
        text = format_choices(format_value(error["input"]), choices) if len(choices) > 1 else f"it must be {choices[0]}"
        return f"{text} ({key.doc})" if key and len(choices) <= 2 else text
    if error_type == "extra_forbidden":  # unknown keys are reported before
        return "an older name of this key is also given; omit it"
    return describe_requirement(error)


def describe_validation_error(
    error: ValidationError, locate: Callable[[KeyPath], str | None], keys: Mapping[KeyPath, ConfigKey] | None = None
) -> Iterator[str]:
    """Yield one line for each problem that pydantic found.

    Args:
        error: pydantic's error.
        locate: function that returns where a key was set, or where a missing one was expected.
        keys: keys with their choices and descriptions; those of a configuration if None.
    """
    keys = list_config_keys() if keys is None else keys
    alternatives: dict[tuple[str | int, ...], list[str]] = {}
    items = []
    for item in error.errors(include_url=False):
        location = list(item["loc"][1:])  # without the section, which users never write
        if location and UNION_MEMBER.fullmatch(str(location[-1])):
            location.pop()
            text = _list_valid_values(dict(item), None).removeprefix("it must be ").removesuffix(WITHOUT_QUOTES)
            alternatives.setdefault(tuple(location), []).append(text)
            if len(alternatives[tuple(location)]) > 1:
                continue
        items.append((item, location))
    missing = [".".join(map(str, path)) for item, path in items if item["type"] == "missing" and tuple(path) in keys]
    if len(missing) > 1:
        items = [item for item in items if ".".join(map(str, item[1])) not in missing]
    for item, location in items:
        is_key = location[-1:] == [MAPPING_KEY]
        if is_key:
            location.pop()
        path = tuple(part for part in location if isinstance(part, str))
        source = locate(path)
        prefix = f"{source}: " if source else ""
        name = name_location(location)
        if is_key:
            owner, given = name_location(location[:-1]), quote_text(str(item["input"]))
            yield f"{prefix}{owner}: {given}: {_list_valid_values(dict(item), None)}"
            continue
        if item["type"] == "missing":
            key = keys.get(path)
            yield f"{prefix}{name} is missing ({key.doc if key else 'required'}); set it in a file or as {name}=…"
            continue
        if item["type"] == "empty_item":
            yield f"{prefix}item {item['ctx']['number']} of {name} is empty; leave it out"
            continue
        if item["type"] == "empty_text":
            none = "null for none" if keys else "leave it out"
            yield f"{prefix}{name} is empty; give a value{f', or {none}' if item['ctx']['optional'] else ''}"
            continue
        if tuple(location) in alternatives:
            choices = " or ".join(dict.fromkeys(alternatives[tuple(location)]))
            yield f"{prefix}{name} is {_format_invalid_value(dict(item))}; it must be {choices}"
            continue
        if item["input"] is None and item["type"] in ("list_type", "dict_type", "model_type"):
            values = "values" if item["type"] == "list_type" else "keys, write {}"
            yield f"{prefix}{name} is empty (null); give it {values}, or remove it"
            continue
        yield f"{prefix}{name} is {_format_invalid_value(dict(item))}; {_list_valid_values(dict(item), keys.get(path))}"
    if len(missing) > 1:
        source = locate(tuple(missing[0].split(".")))
        prefix = f"{source}: " if source else ""
        yield f"{prefix}{', '.join(missing)} are missing; set them, or also name a file that does, such as model/125M"


def describe_option_error(error: ValidationError, name: str) -> str:
    """Describe an option value that the command-line library rejected, as for a configuration key."""
    item = error.errors(include_url=False)[0]
    return f"{name} is {format_value(item['input'])}; {_list_valid_values(dict(item), None)}"


def parse_section(section: type[SectionT], values: Mapping[str, Any], source: str | None = "command line") -> SectionT:
    """Build a section from the names and values of its keys.

    Args:
        section: class of the section.
        values: values by key name.
        source: where they were given, for messages.

    Raises:
        UserError: one line per problem.
    """
    prefix = f"{source}: " if source else ""
    if unknown := [name for name in values if name not in list_accepted_names(section)]:
        raise UserError(f"{prefix}there is no option {unknown[0]}; {format_choices(unknown[0], section.model_fields)}")
    wrapper = create_model("CommandLine", __base__=ConfigSection, options=(section, ...))
    try:
        return wrapper.model_validate({"options": dict(values)}).options  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError("\n".join(describe_validation_error(error, lambda _: source, keys={}))) from error
