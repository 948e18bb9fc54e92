"""Rows of tables: group runs that are seeds of one method, and name different trainings distinctly.

A row of a table is the mean over the seeds of one method. Runs are seeds of one method if their records have equal
training digests and the same number of steps, and no two of them have the same seed. If a name covers more than that,
each training gets its own name: the name plus the folder of its runs. A table therefore never averages different
models, regardless of how the runs were evaluated.

Records without a digest, from earlier versions or other programs, are grouped by steps and seeds only.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from megatron.reports.records import Record

SEED_FOLDER = re.compile(r"seed_\d+")
"""Pattern of the last component of a sweep's run folder."""
MAX_NAMED_METHODS = 4
"""Maximum number of methods that a note names."""
MAX_NAMED_FOLDERS = 2
"""Maximum number of folders in a name; more are counted."""


class _Model(NamedTuple):
    """One trained model of a method."""

    method: str
    run: str | None
    seed: int
    step: int | None
    training_digest: str | None

    @classmethod
    def from_record(cls, record: Record) -> "_Model":
        return cls(record.method, record.run, record.seed, record.step, record.training_digest)

    @property
    def folder(self) -> str | None:
        return None if self.run is None else get_run_folder_without_seed(self.run)


def get_table_key(record: Record) -> tuple[Hashable, ...]:
    """Return a key that is equal for records of one table."""
    length = None if record.place is None else record.length
    targets = record.target_digest, record.smoothing
    return record.metric, record.axis, length, record.protocol, record.train_length, *targets


def get_run_folder_without_seed(run: str) -> str:
    """Return the folder of a run, without the seed that distinguishes a sweep's runs."""
    path = PurePath(run)
    return str(path.parent if SEED_FOLDER.fullmatch(path.name) else path)


def disambiguate_methods(records: Sequence[Record]) -> list[Record]:
    """Return the records with distinct names for distinct trainings: rotary [runs/a], rotary [runs/b]."""
    rows: dict[str, dict[Hashable, set[_Model]]] = {}
    for record in records:
        rows.setdefault(record.method, {}).setdefault(get_table_key(record), set()).add(_Model.from_record(record))
    labels: dict[_Model, str] = {}
    for tables in rows.values():
        if not all(map(_are_seeds_of_one_method, tables.values())):
            labels |= _label_models(sorted(set().union(*tables.values()), key=repr))
    return [
        record.replace(method=f"{record.method} [{label}]")
        if (label := labels.get(_Model.from_record(record)))
        else record
        for record in records
    ]


def quote_method(method: str) -> str:
    """Return the name of a method inside a sentence, in quotation marks if it is the ordinary word none."""
    return f"“{method}”" if method == "none" else method


def describe_unequal_training(records: Sequence[Record]) -> str | None:
    """Return a sentence if methods of a table were trained for different numbers of steps or tokens, else None.

    Tokens are compared among runs with the same seed, because the lengths of a task's sequences depend on it.
    """
    seeds = dict.fromkeys(record.seed for record in records)
    for unit, runs in (("steps", records), *(("tokens", [r for r in records if r.seed == seed]) for seed in seeds)):
        methods: dict[int, dict[str, None]] = {}  # ordered sets
        for record in runs:
            if (count := record.step if unit == "steps" else record.train_tokens) is not None:
                methods.setdefault(count, {})[record.method] = None
        if len(methods) > 1:
            parts = [
                f"{count:,}{'' if count else ', imported or untrained'} ({_join_methods(list(named))})"
                for count, named in sorted(methods.items())
            ]
            return f"Methods were trained for different numbers of {unit}: {', '.join(parts)}."
    return None


def _join_methods(methods: Sequence[str]) -> str:
    """Join the names of methods in a note, of many only the first."""
    named = map(quote_method, methods[:MAX_NAMED_METHODS])
    return ", ".join(named) + " and others" * (len(methods) > MAX_NAMED_METHODS)


def describe_missing_training_digests(records: Iterable[Record]) -> str | None:
    """Return a sentence on methods whose runs count as seeds of one method although a digest is missing, or None.

    Runs in one sweep folder, which differ in their seed_N, need no digest.
    """
    models: dict[str, set[_Model]] = {}
    for record in records:
        if record.run is not None:
            models.setdefault(record.method, set()).add(_Model.from_record(record))
    unverified = [
        method
        for method, own in models.items()
        if any(model.training_digest is None for model in own)
        and len({model.seed for model in own}) > 1
        and len({model.folder for model in own}) > 1
    ]
    if not unverified:
        return None
    return (
        f"The results of {_join_methods(unverified)} lack training digests: runs with the same name and number of "
        "steps count as seeds of one method."
    )


def _are_seeds_of_one_method(row: Iterable[_Model]) -> bool:
    models = set(row)
    digests = {model.training_digest for model in models} - {None}
    return len({model.step for model in models}) <= 1 and len(digests) <= 1 and not _has_repeated_seeds(models)


def _has_repeated_seeds(models: Iterable[_Model]) -> bool:
    runs_by_seed: dict[int, set[str | None]] = {}
    for model in models:
        runs_by_seed.setdefault(model.seed, set()).add(model.run)
    return any(len(runs) > 1 for runs in runs_by_seed.values())


def _label_models(models: Sequence[_Model]) -> dict[_Model, str]:
    """Return labels that distinguish the trainings of one name. Seeds of one training share a label."""
    groups: list[list[_Model]] = []
    for same_training in _group(models, lambda model: (model.step, model.training_digest)):
        splits: tuple[Callable[[_Model], Hashable], ...] = (
            lambda model: None, lambda model: model.folder, lambda model: model.run
        )  # fmt: skip
        candidates = [_group(same_training, split) for split in splits]
        groups += next((found for found in candidates if not any(map(_has_repeated_seeds, found))), candidates[-1])
    descriptions: tuple[Callable[[list[_Model]], str], ...] = (
        lambda group: _join_folders(group),
        lambda group: _describe_group(group),
        lambda group: _describe_group(group, step=True),
        lambda group: _describe_group(group, digest=True),
        lambda group: _describe_group(group, step=True, digest=True),
    )
    for describe in descriptions:
        labels = [describe(group) for group in groups]
        if len(set(labels)) == len(labels):
            break
    return {model: label for group, label in zip(groups, labels, strict=True) for model in group}


def _group(models: Iterable[_Model], key: Callable[[_Model], Hashable]) -> list[list[_Model]]:
    groups: dict[Hashable, list[_Model]] = {}
    for model in models:
        groups.setdefault(key(model), []).append(model)
    return list(groups.values())


def _join_folders(group: Sequence[_Model]) -> str:
    folders = sorted({model.folder for model in group if model.folder is not None})
    left_out = len(folders) - MAX_NAMED_FOLDERS
    return ", ".join(folders[:MAX_NAMED_FOLDERS]) + (f" and {left_out} more" if left_out > 0 else "")


def _describe_group(group: Sequence[_Model], *, step: bool = False, digest: bool = False) -> str:
    first = group[0]
    parts = sorted({model.run for model in group if model.run is not None})
    parts += [f"step {first.step:,}"] if step and first.step is not None else []
    parts += [f"training {first.training_digest}"] if digest and first.training_digest is not None else []
    return ", ".join(parts)
