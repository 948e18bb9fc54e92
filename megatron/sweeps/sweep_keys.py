"""Keys under `sweep:`: collected from files and the command line, and validated with one line per problem."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from megatron.config.config_layers import COMMAND_LINE
from megatron.config.load import split_override
from megatron.config.method_names import list_processor_values, list_temperature_values
from megatron.config.schema import KeyPath, describe_validation_error
from megatron.config.yaml_files import YamlDocument, describe_non_mapping, format_value
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import ConfigSection, list_accepted_names
from megatron.options.sweep import (
    BRANCH,
    SEEDS,
    BenchmarkOptions,
    BranchOptions,
    FurtherEvaluationOptions,
    LeaderboardOptions,
    SweepCorpusOptions,
    SweepOptions,
)
from megatron.options.training import MAX_SEED
from megatron.reports.metrics import METRICS
from megatron.utils.errors import UserError, join_problems, shorten_text
from megatron.utils.formatting import format_choices, format_quantity, suggest_names

VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""Pattern of variant names, which are also folder names."""
RUN_FOLDER = re.compile(r"seed_\d+")
"""Folder name of a run; folders of benchmarks are next to it."""
MAX_NAME_LENGTH = 255
"""Maximum length of a file name on Linux, in bytes."""

SWEEP_OWNED_KEYS = {"save": "output", "load": "output", "seed": "seeds"}
"""Ordinary keys that a sweep sets itself, and the sweep key that determines each."""


class _SweepKeys(ConfigSection):
    sweep: SweepOptions


class _SweepFile(ConfigSection):
    file: _SweepKeys


def collect_sweep_keys(documents: Sequence[YamlDocument]) -> tuple[dict[str, Any], dict[str, YamlDocument], list[str]]:
    """Return the merged keys of `sweep:`, the file that set each (and `sweep` itself), and notes on replaced keys."""
    values: dict[str, Any] = {}
    setters: dict[str, YamlDocument] = {}
    notes = []
    for document in documents:
        if "sweep" not in document.values:
            continue
        keys = document.values["sweep"]
        if not isinstance(keys, dict):
            raise UserError(f"{document.locate(('sweep',))}: sweep {describe_non_mapping(keys)}")
        for name in keys.keys() & values.keys():
            if values[name] != keys[name]:
                old, new = setters[name].locate(("sweep", name)), document.locate(("sweep", name))
                notes.append(f"sweep.{name} ({old}) replaced ({new})")
        values |= keys
        setters |= dict.fromkeys([*keys, "sweep"], document)
    if not setters:
        names = ", ".join(document.source for document in documents)
        raise UserError(f"{names}: no sweep: mapping found; a sweep requires one")
    return values, setters, sorted(notes)


def build_sweep_locator(setters: dict[str, YamlDocument], overrides: Sequence[str]) -> Callable[[KeyPath], str]:
    """Return a function that locates a key of `sweep:`: the command line, or `file:line`."""
    overridden = [tuple(split_override(text)[0].split(".")) for text in overrides]

    def locate(path: KeyPath) -> str:
        document = setters[path[1]] if path[1:] and path[1] in setters else setters["sweep"]
        is_set = any(path[: len(key)] == key for key in overridden)  # set directly or through a parent
        is_opened = path not in document.lines and any(key[: len(path)] == path for key in overridden)
        return COMMAND_LINE if is_set or is_opened else document.locate(path)

    return locate


def split_by_source(
    values: dict[str, Any], path: KeyPath, locate: Callable[[KeyPath], str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a mapping's keys into those set on the command line and those set in a file."""
    from_command_line: dict[str, Any] = {}
    from_file: dict[str, Any] = {}
    for name, value in values.items():
        inner = (*path, name)
        if locate(inner) == COMMAND_LINE:
            from_command_line[name] = value
        elif isinstance(value, dict):
            overridden, from_file[name] = split_by_source(value, inner, locate)
            from_command_line |= {name: overridden} if overridden else {}
        else:
            from_file[name] = value
    return from_command_line, from_file


def select_part(document: YamlDocument, path: KeyPath, values: dict[str, Any] | None = None) -> YamlDocument:
    """Return the mapping under a path as a separate document with its lines; for an empty path, all except `sweep`."""
    if not path:
        remaining = {name: value for name, value in document.values.items() if name != "sweep"}
        return replace(document, values=remaining, lines={p: n for p, n in document.lines.items() if p[0] != "sweep"})
    lines = {p[len(path) :]: n for p, n in document.lines.items() if p[: len(path)] == path and len(p) > len(path)}
    return YamlDocument(document.source, values or {}, lines)


def apply_sweep_override(settings: dict[str, Any], text: str) -> None:
    """Apply `sweep.a.b=value` to the mapping."""
    name, value = split_override(text)
    *outer, last = name.split(".")[1:]
    inside = settings
    for part in outer:
        if not isinstance(inside.setdefault(part, {}), dict):
            raise UserError(f"command line: {name}: sweep.{part} is {format_value(inside[part])}, not a mapping")
        inside = inside[part]
    for other in list_other_spellings(last):
        inside.pop(other, None)
    inside[last] = value


def list_other_spellings(name: str) -> list[str]:
    """Return the keys of an evaluation that have the same meaning as a key, which therefore replaces them."""
    if name in ("lengths", "multiples"):
        return ["lengths", "multiples"]
    fields = EvaluationOptions.model_fields.items()
    return [other for key, field in fields if name in (key, field.alias) for other in (key, field.alias) if other]


def find_sweep_problems(values: dict[str, Any], locate: Callable[[KeyPath], str]) -> SweepOptions:
    """Validate the `sweep:` mapping.

    Args:
        values: the mapping.
        locate: returns `file:line` for a key path that begins with `sweep`.

    Raises:
        UserError: one line per problem with location, key, value and valid values.
    """
    problems = list(_find_unknown_keys(values, locate))
    if not problems:
        try:
            options = _SweepFile.model_validate({"file": {"sweep": values}}).file.sweep
        except ValidationError as error:
            problems += describe_validation_error(error, locate, keys={})
        else:
            problems += _find_inconsistencies(options, locate)
    if problems:
        raise UserError(join_problems(problems))
    return options


def check_no_owned_keys(names: Sequence[str], locate: Callable[[str], str]) -> None:
    """Reject ordinary keys that a sweep sets itself; `locate` returns where one was set. Raises UserError."""
    for name in names:
        if (instead := SWEEP_OWNED_KEYS.get(name.replace("-", "_"))) is not None:
            raise UserError(f"{locate(name)}: {name} is set by the sweep: use sweep.{instead}")


def _find_unknown_keys(values: dict[str, Any], locate: Callable[[KeyPath], str]) -> Iterator[str]:
    sections: list[tuple[KeyPath, type[ConfigSection]]] = [
        (("sweep",), SweepOptions),
        (("sweep", "corpus"), SweepCorpusOptions),
        (("sweep", "evaluate"), EvaluationOptions),
        (("sweep", "leaderboard"), LeaderboardOptions),
        *((("sweep", "evaluations", name), FurtherEvaluationOptions) for name in _list_names(values, "evaluations")),
    ]
    for name in _list_names(values, "benchmarks"):
        path: KeyPath = ("sweep", "benchmarks", name)
        sections += [(path, BenchmarkOptions), ((*path, "evaluate"), EvaluationOptions)]
        inner = get_inside(values, path[1:])
        further = _list_names(inner if isinstance(inner, dict) else {}, "evaluations")
        sections += [((*path, "evaluations", inner_name), FurtherEvaluationOptions) for inner_name in further]
    for path, section in sections:
        inside = get_inside(values, path[1:])
        for name in inside if isinstance(inside, dict) else ():
            if name not in list_accepted_names(section):
                full = (*path, name)
                yield f"{locate(full)}: unknown key {'.'.join(full)!r}; {_suggest_key(full, section.model_fields)}"


def get_inside(values: Any, path: KeyPath) -> Any:
    """Return the value under a path of keys, or None."""
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _list_names(values: dict[str, Any], key: str) -> list[str]:
    """Return the keys of a mapping in the sweep; empty if it is not a mapping, which is reported elsewhere."""
    inside = values.get(key)
    return list(inside) if isinstance(inside, dict) else []


def _find_inconsistencies(options: SweepOptions, locate: Callable[[KeyPath], str]) -> Iterator[str]:
    for name, keys in options.variants.items():
        yield from _find_name_problems("variant", name, locate(("sweep", "variants", name)))
        yield from _find_owned_keys(keys, ("sweep", "variants", name), locate)
        yield from _find_seed_problems(keys, ("sweep", "variants", name, SEEDS), locate)
    yield from _find_branch_problems(options, locate)
    yield from _find_variant_problems(options.evaluations, options, ("sweep", "evaluations"), locate)
    for name, benchmark in options.benchmarks.items():
        path: KeyPath = ("sweep", "benchmarks", name)
        yield from _find_name_problems("benchmark", name, locate(path))
        yield from _find_owned_keys(benchmark.keys, (*path, "keys"), locate)
        yield from _find_variant_problems({name: benchmark}, options, ("sweep", "benchmarks"), locate)
        yield from _find_variant_problems(benchmark.evaluations, options, (*path, "evaluations"), locate)
        for variant in benchmark.variants or ():
            if variant in options.branches:
                yield f"{locate(path)}: {variant} branches from another variant's run, which benchmarks do not support"
    methods = [name for name in (*list_processor_values(), *list_temperature_values()) if name != "none"]
    for name in () if options.leaderboard is None else options.leaderboard.ablations:
        if name not in methods:
            location = locate(("sweep", "leaderboard", "ablations"))
            yield (
                f"{location}: sweep.leaderboard.ablations: {name!r} is not a score processor or temperature; "
                f"{format_choices(name, methods)}"
            )
    if options.against is not None and options.against not in options.variants:
        near = format_choices(options.against, options.variants)
        yield f"{locate(('sweep', 'against'))}: sweep.against is {options.against!r}, which is not a variant; {near}"
    if options.part is not None and options.records is None:
        location = locate(("sweep", "part"))
        yield f"{location}: sweep.part needs sweep.records, the folder in which machines share their records"
    if options.records is not None and options.branches:
        name = next(iter(options.branches))
        yield (
            f"{locate(('sweep', 'records'))}: sweep.records: variant {name} branches from a checkpoint, which records "
            "lack; remove either"
        )
    location = locate(("sweep", "published"))
    for published in options.published:
        if published.metric not in METRICS:
            near = format_choices(published.metric, METRICS)
            yield f"{location}: {published.source}: {published.metric!r} is not a metric; {near}"
        for name, values in published.rows.items():
            if name not in options.variants:
                near = format_choices(name, options.variants)
                yield f"{location}: {published.source}: {name!r} is not a variant of this sweep; {near}"
            if len(values) != len(published.lengths):
                yield (
                    f"{location}: {published.source}: {name} has {format_quantity(len(values), 'value')} for "
                    f"{format_quantity(len(published.lengths), 'length')}; use null for missing values"
                )
    if len(set(options.seeds)) < len(options.seeds):
        yield f"{locate(('sweep', 'seeds'))}: sweep.seeds repeats a seed: {', '.join(map(str, options.seeds))}"


def _find_name_problems(kind: str, name: str, location: str) -> Iterator[str]:
    """Report names that are not valid folder names."""
    prefix = f"{location}: {kind} {shorten_text(name)!r}: {kind} names become folder names"
    if RUN_FOLDER.fullmatch(name):
        yield f"{prefix}, and this is the name of a run's folder; choose another"
    elif not VALID_NAME.fullmatch(name):
        yield f"{prefix}; use only letters, digits and _.+-, with a letter or digit first"
    elif len(name) > MAX_NAME_LENGTH:
        yield f"{prefix}; use at most {MAX_NAME_LENGTH} characters"


def _find_owned_keys(keys: dict[str, Any], path: KeyPath, locate: Callable[[KeyPath], str]) -> Iterator[str]:
    for name in keys:
        if (instead := SWEEP_OWNED_KEYS.get(name.replace("-", "_"))) is not None:
            yield f"{locate((*path, name))}: {name} is set by the sweep: use sweep.{instead}"


def _find_seed_problems(keys: dict[str, Any], path: KeyPath, locate: Callable[[KeyPath], str]) -> Iterator[str]:
    seeds = keys.get(SEEDS, [0])
    is_valid = isinstance(seeds, list) and seeds and all(type(s) is int and 0 <= s <= MAX_SEED for s in seeds)
    if not is_valid or len(set(seeds)) < len(seeds):
        given = shorten_text(str(seeds))
        yield f"{locate(path)}: {'.'.join(path)} is {given}; it must be a list of distinct integers, each at least 0"


def _find_variant_problems(
    parts: Mapping[str, FurtherEvaluationOptions | BenchmarkOptions],
    options: SweepOptions,
    path: KeyPath,
    locate: Callable[[KeyPath], str],
) -> Iterator[str]:
    """Report unknown variants in benchmarks or additional evaluations."""
    for name, part in parts.items():
        for variant in part.variants or ():
            if variant not in options.variants:
                near = format_choices(variant, options.variants)
                keys = (*path, name, "variants")
                yield f"{locate(keys)}: {'.'.join(keys)}: {variant!r} is not a variant; {near}"


def _find_branch_problems(options: SweepOptions, locate: Callable[[KeyPath], str]) -> Iterator[str]:
    problems = []
    for name, keys in options.variants.items():
        path, value = ("sweep", "variants", name, BRANCH), keys.get(BRANCH)
        if BRANCH not in keys:
            continue
        try:
            branch = BranchOptions.model_validate(value)
        except ValidationError:
            given = f"{'.'.join(path)} is {format_value(value)}"
            problems.append(f"{locate(path)}: {given}; it must be {{variant: NAME, step: STEP}}")
            continue
        if branch.variant not in options.variants:
            near = format_choices(branch.variant, options.variants)
            problems.append(f"{locate(path)}: {'.'.join(path)}.variant is {branch.variant!r}, not a variant; {near}")
    yield from problems
    if not problems and (left_out := options.variants.keys() - set(options.sort_variants())):
        names = ", ".join(sorted(left_out))
        yield f"{locate(('sweep', 'variants'))}: {names}: these variants branch from each other in a cycle"


def _suggest_key(path: KeyPath, keys: Iterable[str]) -> str:
    """Suggest a full key for a misspelled one among the keys of the same mapping, or list them."""
    shown = {key: ".".join((*path[:-1], key)) for key in keys}
    return suggest_names(path[-1], shown, shown=shown) or f"keys are {', '.join(shown)}"
