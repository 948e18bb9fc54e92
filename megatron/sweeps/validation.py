"""What can be wrong in the `sweep:` mapping, one line per problem."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from megatron.config.schema import KeyPath
from megatron.config.validation_errors import describe_validation_error
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import ConfigSection
from megatron.options.sweep import BRANCH, BranchOptions, SweepCorpusOptions, SweepOptions
from megatron.reports.metrics import METRICS
from megatron.utils.errors import UserError, shorten_text
from megatron.utils.suggestions import format_choices, suggest_names

VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""Names of variants: they are folder names too."""
MAX_NAME_LENGTH = 255
"""Bytes of a name in the file systems of Linux."""

SWEEP_OWNED_KEYS = {"save": "output", "load": "output", "seed": "seeds"}
"""Keys of ordinary configurations that a sweep sets itself, and the key of the sweep that decides them."""


class _SweepKeys(ConfigSection):
    sweep: SweepOptions


class _SweepFile(ConfigSection):
    file: _SweepKeys


def find_sweep_problems(values: dict[str, Any], locate: Callable[[KeyPath], str]) -> SweepOptions:
    """Validate the `sweep:` mapping.

    Args:
        values: the mapping.
        locate: `file:line` of a path of keys that begins with `sweep`.

    Raises:
        UserError: one line per problem: location, key, value and what is valid.
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


def refuse_owned_keys(names: Sequence[str], locate: Callable[[str], str]) -> None:
    """Refuse ordinary keys that a sweep sets itself; `locate` says who set one. Raises UserError."""
    for name in names:
        if (instead := SWEEP_OWNED_KEYS.get(name.replace("-", "_"))) is not None:
            raise UserError(f"{locate(name)}: {name} is set by the sweep: use sweep.{instead}")


def _find_unknown_keys(values: dict[str, Any], locate: Callable[[KeyPath], str]) -> Iterator[str]:
    sections: tuple[tuple[KeyPath, type[ConfigSection]], ...] = (
        (("sweep",), SweepOptions),
        (("sweep", "corpus"), SweepCorpusOptions),
        (("sweep", "evaluate"), EvaluationOptions),
    )
    for path, section in sections:
        inside = values if len(path) == 1 else values.get(path[-1])
        for name in inside if isinstance(inside, dict) else ():
            if name not in section.model_fields:
                full, hint = (*path, name), _suggest_key(name, list(section.model_fields))
                yield f"{locate(full)}: unknown key {'.'.join(full)!r}{hint}"


def _find_inconsistencies(options: SweepOptions, locate: Callable[[KeyPath], str]) -> Iterator[str]:
    for name, keys in options.variants.items():
        if not VALID_NAME.fullmatch(name):
            location = locate(("sweep", "variants", name))
            yield f"{location}: variant {shorten_text(name)!r} names a folder too: use letters, digits and _.+- only"
        elif len(name) > MAX_NAME_LENGTH:
            location, shown = locate(("sweep", "variants", name)), shorten_text(name)
            yield f"{location}: variant {shown} names a folder too: use {MAX_NAME_LENGTH} characters at most"
        for key_name in keys:
            if (instead := SWEEP_OWNED_KEYS.get(key_name.replace("-", "_"))) is not None:
                inside = locate(("sweep", "variants", name, key_name))
                yield f"{inside}: {key_name} is set by the sweep: use sweep.{instead}"
    yield from _find_branch_problems(options, locate)
    if options.against is not None and options.against not in options.variants:
        near = format_choices(options.against, options.variants)
        yield f"{locate(('sweep', 'against'))}: sweep.against is {options.against!r}, which is no variant; {near}"
    location = locate(("sweep", "published"))
    for published in options.published:
        if published.metric not in METRICS:
            near = format_choices(published.metric, METRICS)
            yield f"{location}: {published.source}: {published.metric!r} is no metric; {near}"
        for name, values in published.rows.items():
            if name not in options.variants:
                near = format_choices(name, options.variants)
                yield f"{location}: {published.source}: {name!r} is no variant of this sweep; {near}"
            if len(values) != len(published.lengths):
                yield (
                    f"{location}: {published.source}: {name} has {len(values)} values for {len(published.lengths)} "
                    "lengths; write null where there is none"
                )
    if len(set(options.seeds)) < len(options.seeds):
        yield f"{locate(('sweep', 'seeds'))}: sweep.seeds repeats a seed: {', '.join(map(str, options.seeds))}"


def _find_branch_problems(options: SweepOptions, locate: Callable[[KeyPath], str]) -> Iterator[str]:
    problems = []
    for name, keys in options.variants.items():
        path, value = ("sweep", "variants", name, BRANCH), keys.get(BRANCH)
        if BRANCH not in keys:
            continue
        try:
            branch = BranchOptions.model_validate(value)
        except ValidationError:
            problems.append(f"{locate(path)}: branch is {value}; it must be {{variant: NAME, step: STEP}}")
            continue
        if branch.variant not in options.variants:
            near = format_choices(branch.variant, options.variants)
            problems.append(f"{locate(path)}: branch.variant is {branch.variant!r}, which is no variant; {near}")
    yield from problems
    if not problems and (left_out := options.variants.keys() - set(options.sort_variants())):
        names = ", ".join(sorted(left_out))
        yield f"{locate(('sweep', 'variants'))}: {names}: each branches from another of these, so none can be the first"


def _suggest_key(name: str, keys: Sequence[str]) -> str:
    return f"; {suggest_names(name, keys) or 'keys are ' + ', '.join(keys)}"
