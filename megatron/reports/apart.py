"""Names that stand for one thing: results of several files may call different runs by the same name.

Seeds repeat a run, and a table's cell is their mean. Two runs of one seed repeat nothing, and neither do two that
trained for different numbers of steps: each gets the folder of its run added to its name, so that no table ever
averages them. What is told twice of one run is told once, by the last that says it.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from megatron.reports.records import Record

SEED = re.compile(r"seed_\d+")
"""The last part of a run's folder in a sweep."""


def told_apart(records: Sequence[Record]) -> list[Record]:
    """The records, where one name stands for several runs with these added: rotary [runs/a/rotary]."""
    runs: dict[tuple[tuple[Hashable, str], int], set[str | None]] = {}
    steps: dict[tuple[Hashable, str], set[int | None]] = {}
    for record in records:
        row = _cell(record), record.method
        runs.setdefault((row, record.seed), set()).add(record.run)
        steps.setdefault(row, set()).add(record.step)
    mixed = {method for ((_, method), _), found in runs.items() if len(found) > 1}
    mixed |= {method for (_, method), found in steps.items() if len(found) > 1}
    return [
        record.replace(method=f"{record.method} [{_folder(record.run)}]")
        if record.method in mixed and record.run is not None
        else record
        for record in records
    ]


def contradictions(found: Mapping[Path, Sequence[Record]]) -> Iterator[str]:
    """Lines about files that tell of the same run something else than a file before them."""
    known: dict[tuple[Hashable, ...], tuple[Path, float]] = {}
    for path, records in found.items():
        others: dict[Path, int] = {}
        for record in records:
            key = (*_cell(record), record.method, record.seed, record.run)
            before = known.get(key)
            if before is not None and before[1] != record.value and before[0] != path:
                others[before[0]] = others.get(before[0], 0) + 1
            known[key] = (path, record.value)
        for other, count in others.items():
            numbers = "1 number" if count == 1 else f"{count} numbers"
            yield f"{path}: has {numbers} of runs of which {other} has others; these here are shown"


def _cell(record: Record) -> tuple[Hashable, ...]:
    """Equal for records that stand in one column of one table."""
    measured = record.metric, record.axis, record.at, record.length
    return *measured, record.protocol, record.train_length, record.target_digest


def _folder(run: str) -> str:
    """A run's folder without its seed."""
    path = PurePath(run)
    return str(path.parent if SEED.fullmatch(path.name) else path)
