"""`./deepy.py status RUN…` and `./deepy.py checkpoints RUN`: progress and checkpoints of runs.

Everything is read from the files in their folders, without importing torch.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron.checkpoint import layout, run_folder
from megatron.checkpoint.run_folder import get_config_path
from megatron.config.schema import CONFIG_FILE
from megatron.config.yaml_files import format_value, read_yaml
from megatron.launch.slurm import CONFIGURATION, SCRIPT
from megatron.training.metrics_log import (
    DIVERGED_KIND,
    HEARTBEAT_FILE,
    METRICS_FILE,
    describe_damage,
    find_unreadable_lines,
    read_heartbeat,
    read_metrics_log,
)
from megatron.utils.atomic_io import LOCK, is_lock_held
from megatron.utils.console import PlainConsole, print_table
from megatron.utils.errors import FarfieldError, UserError, check_reachable, describe_cause
from megatron.utils.formatting import format_bytes, format_decimal, format_duration, format_quantity, suggest_path

MAX_HEARTBEAT_AGE = 60.0
"""Maximum age of the heartbeat of a running run on another machine, in seconds."""
REFRESH_SECONDS = 5.0
"""Interval between updates, in seconds."""
UNKNOWN = "–"
"""Text of a table cell without a value."""
_STATES = {"start": "starting", "validate": "validating", "harness": "evaluating", "save": "saving"}
"""States of a running run by the phase of its heartbeat; a run in any other phase is training."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class RunStatus:
    """Status of a run according to its folder; unknown values are None."""

    run: str
    state: str
    """submitted, starting, training, validating, evaluating, saving, finished, diverged, imported, or stopped."""
    step: int
    train_iters: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    checkpoint: int | None
    """Step of the newest checkpoint."""
    problems: tuple[str, ...] = ()
    """One line for each unreadable file, with the reason."""
    phase: str | None = None
    """Phase of the step that a running run is in, such as `data` (`Watchdog.enter_phase`)."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs at the given paths, each a run's folder or a folder of runs.

    A folder with a submitted job's script counts as a run until the job has written one.

    Raises:
        UserError: there are no runs.
    """
    runs: list[Path] = []
    for path in paths:
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: is a file; it must be a run's folder, or a folder of runs")
        if not path.is_dir():
            check_reachable(path)
            suggestion = suggest_path(path, is_folder=True)
            raise UserError(f"{path}: no such folder; {suggestion}".rstrip("; "))
        candidates = [path] if _is_run(path) else sorted(_walk_run_folders(path))
        found_runs = [run for run in candidates if _is_run(run)]
        found_runs += [
            folder
            for folder in candidates
            if (folder / SCRIPT).is_file() and not any(run.is_relative_to(folder) for run in found_runs)
        ]
        if not found_runs:
            raise UserError(f"{path}: contains no run")
        runs += [run for run in found_runs if run not in runs]
    return runs


def _walk_run_folders(path: Path) -> Iterator[Path]:
    """Yield folders with files of a run or job. Checkpoints are excluded because training may rename them meanwhile."""
    for folder, subfolders, files in os.walk(path):
        subfolders[:] = [name for name in subfolders if name != layout.CHECKPOINTS]
        if not {CONFIG_FILE, LOCK, METRICS_FILE, SCRIPT}.isdisjoint(files):
            yield Path(folder)


def _is_run(path: Path) -> bool:
    """Return True for a folder with a run's lock, checkpoints or records, and for an unreadable one to report.

    Other programs also write folders with a config.yml, metrics.jsonl or checkpoints.
    """
    try:
        if (path / LOCK).exists() or layout.list_checkpoints(path):
            return True
        return any(True for _ in read_metrics_log(path / METRICS_FILE))
    except PermissionError:
        return True
    except OSError:
        return False


class _Problems:
    """Errors from reading a run. They hide neither the rest of it nor other runs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def report(self, path: Path) -> Iterator[None]:
        """Turn errors about a file or folder within the block into a line."""
        try:
            yield
        except FarfieldError as error:
            self.lines.append(str(error).splitlines()[0])
        except (OSError, ValueError) as error:
            self.lines.append(f"{path}: cannot be read ({describe_cause(error)})")


def read_status(run: Path) -> RunStatus:
    """Read the status of a run, as far as its files are readable."""
    problems = _Problems()
    records: list[dict[str, Any]] = []
    saved: list[int] = []
    beat: dict[str, Any] = {}
    train_iters = None
    with problems.report(run / METRICS_FILE):
        records = [record for _, record in read_metrics_log(run / METRICS_FILE)]
        if damaged := find_unreadable_lines(run / METRICS_FILE):
            problems.lines.append(describe_damage(run / METRICS_FILE, damaged))
    with problems.report(run / layout.CHECKPOINTS):
        saved = [number for value in layout.list_checkpoints(run) if (number := layout.parse_step(value)) is not None]
    with problems.report(run / HEARTBEAT_FILE):
        beat = read_heartbeat(run)
    is_submitted = (run / SCRIPT).is_file() and not _is_run(run)
    with problems.report(run / CONFIG_FILE):
        if (configured := run / CONFIGURATION if is_submitted else get_config_path(run)).exists():
            train_iters = _read_key(configured, "train_iters", int)
    train = [record for record in records if record.get("kind") == "train"]
    valid = [record for record in records if record.get("kind") == "valid"]
    last: dict[str, Any] = train[-1] if train else {}
    alive = _is_alive(run, beat)
    reached = _get_finite(beat.get("step")) if alive else None
    step = max(last.get("step", 0), *saved, int(reached or 0))
    state, phase = "stopped", str(beat.get("phase", "start")) if alive else None
    if is_submitted:
        state = "submitted"
    elif phase is not None:
        state = _STATES.get(phase, "training")
    elif records and records[-1].get("kind") == DIVERGED_KIND:
        state, step = DIVERGED_KIND, max(step, int(records[-1]["step"]))
    elif train_iters is not None and step >= train_iters:
        state = "finished"
    elif train_iters is None and saved == [0] and not records and not problems.lines:
        state = "imported"  # every training has train_iters
    return RunStatus(
        str(run), state, step, train_iters, _get_finite(last.get("loss")),
        _get_finite(valid[-1].get("loss")) if valid else None, _get_finite(last.get("tokens_per_second")),
        _get_finite(last.get("mfu")), _get_finite(last.get("seconds_left")) if alive else None,
        saved[-1] if saved else None, tuple(problems.lines), phase,
    )  # fmt: skip


def _get_finite(value: object) -> float | None:
    """Return a finite number unchanged, or None for any other value in a file."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        return None
    return value


def is_alive(run: Path) -> bool:
    """Return True if a run is training now, on any machine."""
    try:
        return _is_alive(run, read_heartbeat(run))
    except (OSError, ValueError):
        return _is_alive(run, {})


def _is_alive(run: Path, beat: dict[str, Any]) -> bool:
    """Return True if a run's folder is locked or its heartbeat is recent.

    On this machine, a released lock overrides the heartbeat, which a killed run leaves behind.
    """
    held, at = is_lock_held(run / LOCK), _get_finite(beat.get("time"))
    if held or at is None or time.time() - at >= MAX_HEARTBEAT_AGE:
        return bool(held)
    return held is None or beat.get("host") != socket.gethostname()


def build_status_table(statuses: Sequence[RunStatus], max_width: int) -> Table:
    """Build a table for a terminal with one row per run; if it is too wide, it has narrower gaps and wraps runs."""
    headers, rows = format_status_cells(statuses)
    gap = 2 if max(map(cell_len, format_status_lines(statuses))) <= max_width else 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    table.add_column("run", overflow="fold")
    for header in headers:
        table.add_column(header, no_wrap=True)
    for status, cells in zip(statuses, rows, strict=True):
        table.add_row(*map(Text, (status.run, *cells)))
    return table


def format_status_lines(statuses: Sequence[RunStatus]) -> list[str]:
    """Return the table as untruncated lines: column headers, then one line per run."""
    headers, rows = format_status_cells(statuses)
    table = [("run", *headers), *((status.run, *cells) for status, cells in zip(statuses, rows, strict=True))]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def format_status_cells(statuses: Sequence[RunStatus]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column headers and the cells of each run.

    Columns without any value are omitted, for example MFU on CPUs.
    """
    headers = ("state", "step", "loss", "valid", "tokens/s", "MFU", "left", "saved")
    rows: list[tuple[str, ...]] = [
        (
            status.state,
            f"{status.step:,}" + ("" if status.train_iters is None else f"/{status.train_iters:,}"),
            UNKNOWN if status.loss is None else format_decimal(status.loss, 4),
            UNKNOWN if status.valid_loss is None else format_decimal(status.valid_loss, 4),
            _format_number(status.tokens_per_second, ",.0f"),
            _format_number(status.mfu, ".0%"),
            UNKNOWN if status.seconds_left is None else format_duration(status.seconds_left),
            _format_number(status.checkpoint, ","),
        )
        for status in statuses
    ]
    known = [column for column in range(len(headers)) if not rows or any(row[column] != UNKNOWN for row in rows)]
    return tuple(headers[column] for column in known), [tuple(row[column] for column in known) for row in rows]


def _format_number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def print_status(paths: Sequence[Path], *, as_json: bool, follow: bool = False, console: Console | None = None) -> bool:
    """Print the table once, or repeatedly until no run or sweep is active.

    On a terminal the table is redrawn in place; elsewhere only changed lines are printed.

    Returns:
        False if a run diverged while following.

    Raises:
        UserError: there is no run, or JSON and following were both requested.
    """
    if follow and as_json:
        raise UserError("--json and --follow cannot be combined")
    statuses = [read_status(run) for run in find_runs(paths)]
    if as_json:
        print(json.dumps([asdict(status) for status in statuses], indent=2))
        return True
    console = console or PlainConsole(highlight=False)
    if not console.is_terminal:
        _print_lines(console, format_status_lines(statuses))
    elif not follow:
        console.print(build_status_table(statuses, console.width))
    for line in (line for status in statuses for line in status.problems):
        console.print(f"note: {line}", markup=False, soft_wrap=True)
    if not follow:
        return True
    live = Live(build_status_table(statuses, console.width), console=console, auto_refresh=False)
    with live if console.is_terminal else nullcontext():
        while is_any_run_active(paths):
            time.sleep(REFRESH_SECONDS)
            shown, statuses = statuses, [read_status(run) for run in find_runs(paths)]
            if console.is_terminal:
                live.update(build_status_table(statuses, console.width), refresh=True)
            else:
                _, *lines = format_status_lines(statuses)
                pairs = zip(statuses, lines, strict=True)
                _print_lines(console, [line for status, line in pairs if status not in shown])
    return not any(status.state == DIVERGED_KIND for status in statuses)


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def is_any_run_active(paths: Sequence[Path]) -> bool:
    """Return True if a run in these folders is active, or a sweep that may start some."""
    runs = find_runs(paths)
    folders = {parent for run in runs for parent in run.parents if any(parent.is_relative_to(path) for path in paths)}
    return any(map(run_folder.is_sweep_running, {*paths, *folders})) or any(map(is_alive, runs))


def prune_and_report(run: Path, keep: int, log: Callable[[str], None]) -> None:
    """Delete all but the newest `keep` undamaged checkpoints; those of the run's extra_save_iters are kept.

    Raises UserError (see `list_checkpoint_infos`).
    """
    run_folder.list_checkpoint_infos(run, checksums=False)  # raises if it is not a run
    result = run_folder.verify_and_prune(run, keep, _list_extra_save_steps(run))
    for path in result.deleted:
        log(f"deleted {path}")
    for path, problem in result.damaged:
        log(f"not counted: {path}, damaged: {problem}")
    if result.damaged and result.num_valid < keep:
        log(
            f"nothing was deleted: only {result.num_valid} of --keep {keep} "
            f"{'is' if result.num_valid == 1 else 'are'} undamaged"
        )


def print_checkpoints(run: Path, *, verify: bool, as_json: bool) -> bool:
    """Print a table of checkpoints and return True if all are undamaged. Raises UserError if there is none."""
    checkpoints = run_folder.list_checkpoint_infos(run, checksums=verify)
    losses = _read_losses(layout.find_run_folder(run))
    if as_json:
        rows = [
            {
                "path": str(checkpoint.path),
                "step": checkpoint.step,
                "bytes": checkpoint.bytes,
                "written": checkpoint.written,
                "loss": losses.get(("train", checkpoint.step)),
                "valid_loss": losses.get(("valid", checkpoint.step)),
                "problem": checkpoint.problem,
            }
            for checkpoint in checkpoints
        ]
        print(json.dumps(rows, indent=2))
        return all(checkpoint.problem is None for checkpoint in checkpoints)
    table = Table("step", "size", "written", "loss", "validation", box=None)
    table.add_column("checksums match" if verify else "files complete", overflow="fold")
    for checkpoint in checkpoints:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.written))
        numbers = [losses.get((kind, checkpoint.step)) for kind in ("train", "valid")]
        cells = [UNKNOWN if number is None else format_decimal(number, 4) for number in numbers]
        table.add_row(
            f"{checkpoint.step:,}", format_bytes(checkpoint.bytes), written, *cells, checkpoint.problem or "yes"
        )
    console = PlainConsole(highlight=False)
    print_table(console, table)
    console.print(
        f"{format_quantity(len(checkpoints), 'checkpoint')} in {layout.find_run_folder(run) / layout.CHECKPOINTS}, "
        f"{format_bytes(sum(checkpoint.bytes for checkpoint in checkpoints))} in total"
    )
    return all(checkpoint.problem is None for checkpoint in checkpoints)


def _list_extra_save_steps(run: Path) -> list[int]:
    """Return the steps whose checkpoints are never deleted. Raises UserError if the configuration cannot be read."""
    return _read_key(get_config_path(layout.find_run_folder(run)), "extra_save_iters", list) or []


def _read_key(path: Path, name: str, kind: type[ValueT]) -> ValueT | None:
    """Return one key of a run's configuration without validating the others: a user's own methods may be unavailable.

    Raises UserError if the file cannot be read or the value has another type.
    """
    value = read_yaml(path).values.get(name)
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{path}: {name} is {format_value(value)}, not a value written by a run")
    return value


def _read_losses(run: Path) -> dict[tuple[str, int], float]:
    """Return the recorded losses, by kind and step."""
    losses = {}
    for _, record in read_metrics_log(run / METRICS_FILE):
        if isinstance(record.get("loss"), float):
            losses[str(record.get("kind")), int(record["step"])] = record["loss"]
    return losses
