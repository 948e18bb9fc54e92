"""Outcome of a run, which is records or a failure, and its files.

A sweep writes a file for each run to a folder (`sweep.records`), and failures next to its results file.

    FOLDER/VARIANT/seed_1234.json.gz                 a run of the sweep's own training
    FOLDER/BENCHMARK/VARIANT/seed_1234.json.gz       a run of a benchmark
    FOLDER/results.experiment.json                   title, leaderboard, and digests of the sweep's runs

A run that diverged has a file with its failure instead of records, so it counts as done. A report can be made from such
a folder alone, also while runs are missing.
"""

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.reports.records import Record, record_from_row
from megatron.utils.atomic_io import make_folder, parse_json, write_bytes_atomically, write_text_atomically
from megatron.utils.errors import UserError

RUN_FILE = "seed_{seed}.json.gz"


@dataclass(frozen=True)
class RunFailure:
    """Run that ended without a result."""

    method: str
    """Method name as in records; in a sweep the name of the variant."""
    seed: int
    reason: str
    """Reason, in one line."""
    step: int | None = None
    """Step at which the run failed, if known."""
    train_length: int | None = None
    """Training length of the run, or None if unknown. If None, the failure appears in tables of all training lengths.
    """
    dataset: str | None = None
    """Dataset to be scored, as in records, or None if unknown. If None, the failure appears in tables of all datasets.
    """
    run: str | None = None
    """Folder of the run, as in records, if known."""

    def __post_init__(self) -> None:
        for name, expected_type in (("method", str), ("seed", int), ("reason", str)):
            if not isinstance(getattr(self, name), expected_type):
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        for name in ("step", "train_length"):
            if not isinstance(getattr(self, name), int | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        for name in ("dataset", "run"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}")

    def __str__(self) -> str:
        at_step = "" if self.step is None else f" at step {self.step:,}"
        return f"failed{at_step}: {self.reason}"

    def is_resolved_by(self, record: Record) -> bool:
        """Return True if a record is a result of this run; if its folder is unknown, of this method and seed."""
        if self.run is not None and record.run is not None:
            return os.path.realpath(self.run) == os.path.realpath(record.run)
        return (self.method, self.seed) == (record.method, record.seed)

    def to_row(self) -> dict[str, Any]:
        """Return the fields that are known, as JSON files contain them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


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
    baselines = {record.model_dump_json(): record for record in records if record.run is None}
    return [*runs, *baselines.values()]


def get_failures_path(results_path: Path) -> Path:
    return results_path.with_suffix(".failures.json")


def write_failures(results_path: Path, failures: Sequence[RunFailure]) -> Path | None:
    """Write failures next to their results file. Without failures, remove that file and return None.

    Raises:
        UserError: an existing file at that path is not a list of failures.
    """
    path = get_failures_path(results_path)
    read_failures(results_path)
    if not failures:
        path.unlink(missing_ok=True)
        return None
    rows = [failure.to_row() for failure in failures]
    return write_text_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def read_failures(results_path: Path) -> list[RunFailure]:
    """Read the failures of a results file, or return an empty list if there is no such file.

    Raises:
        UserError: the file is not a list of failures.
    """
    path = get_failures_path(results_path)
    if not path.is_file():
        return []
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("it is not a list of objects")
        return [RunFailure(**row) for row in rows]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a list of failed runs ({error})") from error
