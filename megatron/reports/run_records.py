"""Files with the records of one run each, which a sweep writes to a folder (`sweep.records`).

    FOLDER/VARIANT/seed_1234.json.gz                 a run of the sweep's own training
    FOLDER/BENCHMARK/VARIANT/seed_1234.json.gz       a run of a benchmark
    FOLDER/results.experiment.json                   title, leaderboard, and digests of the sweep's runs

A run that diverged has a file with its failure instead of records, so it counts as done. A report can be made from such
a folder alone, also while runs are missing.
"""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.reports.records import Record, RunFailure, record_from_row
from megatron.utils.atomic_io import make_folder, parse_json, write_bytes_atomically
from megatron.utils.errors import UserError

RUN_FILE = "seed_{seed}.json.gz"


@dataclass(frozen=True)
class RunOutcome:
    """Result of a run: records, or the failure of a training that diverged."""

    records: list[Record] = field(default_factory=list)
    failure: RunFailure | None = None


def get_run_file(folder: Path, benchmark: str | None, variant: str, seed: int) -> Path:
    """Return the path of a run's records."""
    return folder.joinpath(*([] if benchmark is None else [benchmark]), variant, RUN_FILE.format(seed=seed))


def is_run_file(path: Path) -> bool:
    """Return True if an existing file has the name of a run's records."""
    return path.is_file() and path.match(RUN_FILE.format(seed="*"))


def list_run_files(folder: Path) -> list[Path]:
    """List the files of runs in a folder: those of the sweep's own training first, then by benchmark and variant."""
    return sorted(folder.rglob(RUN_FILE.format(seed="*")), key=lambda path: (len(path.parts), path.parts))


def read_run_file(path: Path, digest: str | None = None) -> RunOutcome | None:
    """Read the result of a run.

    Args:
        path: file to read.
        digest: digest that the file must have; any if None.

    Returns:
        The result, or None if the file has another digest.

    Raises:
        UserError: the file is damaged, or contains something else.
    """
    try:
        content = parse_json(gzip.decompress(path.read_bytes()).decode())
        if not isinstance(content, dict) or not isinstance(content.get("records"), list):
            raise ValueError("digest or records are missing")
        if digest is not None and content.get("digest") != digest:
            return None
        failure = content.get("failure")
        return RunOutcome(
            [record_from_row(row) for row in content["records"]], None if failure is None else RunFailure(**failure)
        )
    except (OSError, EOFError, ValueError, TypeError, UserError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as saved records ({error}); restore or remove it") from None


def write_run_file(path: Path, digest: str, outcome: RunOutcome) -> None:
    """Write the result of a run. Equal results give equal files.

    Args:
        path: file to write; its folder is created.
        digest: digest of the settings that determine the result.
        outcome: the run's result.

    Raises:
        UserError: the folder cannot be created.
    """
    make_folder("sweep.records", path.parent)
    content: dict[str, Any] = {"digest": digest, "records": [record.to_row() for record in outcome.records]}
    if outcome.failure is not None:
        content["failure"] = outcome.failure.to_row()
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    write_bytes_atomically(path, gzip.compress(text.encode(), mtime=0))


@dataclass(frozen=True)
class SavedRuns:
    """Saved results of a sweep's runs."""

    records: list[Record]
    """Records of all runs. Trivial baselines, which every run of a task repeats, are last."""
    failures: list[RunFailure]
    """Failures of the runs that diverged."""
    num_runs: int
    """Number of runs with a result."""
    ignored_files: list[Path]
    """Files of runs that the sweep no longer has, or that it now defines otherwise."""


def read_run_folder(folder: Path, digests: Mapping[str, str] | None = None) -> SavedRuns:
    """Read the records of the runs in a folder.

    Args:
        folder: folder of the files.
        digests: digest of each run of the sweep by its file's path relative to the folder. If None, all files are read.

    Raises:
        UserError: a file is damaged.
    """
    records: list[Record] = []
    failures: list[RunFailure] = []
    ignored_files = []
    files = list_run_files(folder)
    for path in files:
        digest = "" if digests is None else digests.get(path.relative_to(folder).as_posix())
        found = None if digest is None else read_run_file(path, digest or None)
        if found is None:
            ignored_files.append(path)
            continue
        records += found.records
        failures += [] if found.failure is None else [found.failure]
    return SavedRuns(sort_baselines_last(records), failures, len(files) - len(ignored_files), ignored_files)


def sort_baselines_last(records: Sequence[Record]) -> list[Record]:
    """Return the records of runs, then baselines without duplicates. Every run of a task repeats its baselines."""
    runs = [record for record in records if record.run is not None]
    baselines = {json.dumps(record.to_row(), sort_keys=True): record for record in records if record.run is None}
    return [*runs, *baselines.values()]
