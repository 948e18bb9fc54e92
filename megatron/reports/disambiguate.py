"""Names that stand for one thing: results of several files may call different runs by the same name.

Seeds repeat a run, and a table's cell is their mean. Two runs of one seed repeat nothing, and neither do two that
trained for different numbers of steps: each gets the folder of its run added to its name, so that no table ever
averages them. What is told twice of one run is told once, by the last that says it.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from megatron.reports.records import Record

SEED_FOLDER = re.compile(r"seed_\d+")
"""The last part of a run's folder in a sweep."""


def disambiguate_methods(records: Sequence[Record]) -> list[Record]:
    """The records, where one name stands for several runs with these added: rotary [runs/a/rotary]."""
    runs_by_row: dict[tuple[tuple[Hashable, str], int], set[str | None]] = {}
    steps_by_row: dict[tuple[Hashable, str], set[int | None]] = {}
    for record in records:
        row_key = _cell_key(record), record.method
        runs_by_row.setdefault((row_key, record.seed), set()).add(record.run)
        steps_by_row.setdefault(row_key, set()).add(record.step)
    ambiguous = {method for ((_, method), _), values in runs_by_row.items() if len(values) > 1}
    ambiguous |= {method for (_, method), values in steps_by_row.items() if len(values) > 1}
    return [
        record.replace(method=f"{record.method} [{_run_folder_without_seed(record.run)}]")
        if record.method in ambiguous and record.run is not None
        else record
        for record in records
    ]


def find_contradictions(records_by_path: Mapping[Path, Sequence[Record]]) -> Iterator[str]:
    """Lines about files that tell of the same run something else than a file before them."""
    latest: dict[tuple[Hashable, ...], tuple[Path, float]] = {}
    for path, records in records_by_path.items():
        conflict_counts: dict[Path, int] = {}
        for record in records:
            key = (*_cell_key(record), record.method, record.seed, record.run)
            previous = latest.get(key)
            if previous is not None and previous[1] != record.value and previous[0] != path:
                conflict_counts[previous[0]] = conflict_counts.get(previous[0], 0) + 1
            latest[key] = (path, record.value)
        for other_path, count in conflict_counts.items():
            count_text = "1 number" if count == 1 else f"{count} numbers"
            yield f"{path}: has {count_text} of runs of which {other_path} has others; these here are shown"


def _cell_key(record: Record) -> tuple[Hashable, ...]:
    """Equal for records that stand in one column of one table."""
    measurement = record.metric, record.axis, record.x_value, record.length
    return *measurement, record.protocol, record.train_length, record.target_digest


def _run_folder_without_seed(run: str) -> str:
    """A run's folder without its seed."""
    path = PurePath(run)
    return str(path.parent if SEED_FOLDER.fullmatch(path.name) else path)
