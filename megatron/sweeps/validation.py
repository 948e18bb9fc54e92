"""Validation of the `sweep:` mapping, with one line per problem."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megatron.config.method_names import list_processor_values, list_temperature_values
from megatron.config.schema import KeyPath, describe_validation_error
from megatron.config.yaml_files import format_value
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
from megatron.utils.errors import UserError, shorten_text
from megatron.utils.formatting import format_choices, suggest_names

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
        raise UserError("\n".join(problems))
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
                full, hint = (*path, name), _suggest_key(name, list(section.model_fields))
                yield f"{locate(full)}: unknown key {'.'.join(full)!r}{hint}"


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
    if options.part is not None:
        where = f"{locate(('sweep', 'part'))}: sweep.part"
        words = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", options.part)
        if words is None or int(words[1]) > int(words[2]):
            yield f"{where} is {shorten_text(options.part)!r}; it must be PART/PARTS, from 1/2 and 2/2 for two machines"
        if options.records is None:
            yield f"{where} needs sweep.records, the folder in which machines share their records"
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
                    f"{location}: {published.source}: {name} has {len(values)} values for {len(published.lengths)} "
                    "lengths; use null for missing values"
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


def _suggest_key(name: str, keys: Sequence[str]) -> str:
    return f"; {suggest_names(name, keys) or 'keys are ' + ', '.join(keys)}"
