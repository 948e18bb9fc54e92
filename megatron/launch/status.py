"""`./deepy.py status RUN…`: how far runs are, from the files in their folders alone. Without torch."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron.checkpoint import folder
from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.run_files import config_file
from megatron.config.load import read
from megatron.errors import FarfieldError, UserError, reason
from megatron.files import parse_json
from megatron.launch.console import PlainConsole
from megatron.quantities import duration
from megatron.training.records import DIVERGED, HEARTBEAT, METRICS, damage_in, lines, unreadable

FRESH = 60.0
"""Seconds: a run on another machine whose heartbeat is older is not alive."""
REFRESHED = 5.0
"""Seconds between two looks."""


@dataclass(frozen=True)
class Status:
    """A run as its folder shows it; None for what is not known."""

    run: str
    state: str
    """training (with its phase), finished, diverged, stopped."""
    step: int
    train_iters: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    checkpoint: int | None
    """The step of the last one."""
    problems: tuple[str, ...] = ()
    """What of its folder cannot be read, and why: a line each."""


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs that are meant: folders of runs, or folders that hold such.

    Raises:
        UserError: there is none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            near = folder.near_folder(path)
            raise UserError(f"{path}: no such folder; {near}".rstrip("; "))
        found_in = (file.parent for name in (folder.CONFIG, LOCK, METRICS) for file in path.rglob(name))
        runs = [path] if _is_run(path) else sorted(set(found_in))
        runs = [run for run in runs if _is_run(run) and folder.CHECKPOINTS not in run.parts[len(path.parts) :]]
        if not runs:
            raise UserError(f"{path}: no run in it")
        found += [run for run in runs if run not in found]
    return found


def _is_run(path: Path) -> bool:
    """It takes the lock before all else. A folder that may not be searched is one: its line says what is wrong."""
    try:
        return any((path / name).exists() for name in (LOCK, METRICS, HEARTBEAT, folder.CHECKPOINTS))
    except PermissionError:
        return True


class _Problems:
    """What cannot be read of a run: it keeps neither the rest of it nor other runs from being shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def told(self, path: Path) -> Iterator[None]:
        """Inside it, what is wrong with a file or folder becomes a line."""
        try:
            yield
        except FarfieldError as error:
            self.lines.append(str(error).splitlines()[0])
        except (OSError, ValueError) as error:
            self.lines.append(f"{path}: cannot be read ({reason(error)})")


def status(run: Path) -> Status:
    """How far a run is, as far as its files can be read."""
    problems = _Problems()
    records: list[dict[str, Any]] = []
    saved: list[int] = []
    beat: dict[str, Any] = {}
    train_iters = None
    with problems.told(run / METRICS):
        records = [record for _, record in lines(run / METRICS)]
        if damaged := unreadable(run / METRICS):
            problems.lines.append(damage_in(run / METRICS, damaged))
    with problems.told(run / folder.CHECKPOINTS):
        saved = [number for each in folder.checkpoints(run) if (number := folder.step_of(each)) is not None]
    with problems.told(run / HEARTBEAT):
        beat = _heartbeat(run)
    with problems.told(run / folder.CONFIG):
        if (configured := config_file(run)).exists():
            train_iters = read(configured).training.train_iters
    train = [record for record in records if record.get("kind") == "train"]
    valid = [record for record in records if record.get("kind") == "valid"]
    last: dict[str, Any] = train[-1] if train else {}
    alive = _alive(run, beat)
    reached = _finite(beat.get("step")) if alive else None
    step = max(last.get("step", 0), *saved, int(reached or 0))
    state = "stopped"
    if alive:
        state = str(beat.get("phase", "starting"))
    elif train_iters is not None and step >= train_iters:
        state = "finished"
    elif records and records[-1].get("kind") == DIVERGED:
        state, step = DIVERGED, max(step, int(records[-1]["step"]))
    return Status(
        str(run), state, step, train_iters, _finite(last.get("loss")),
        _finite(valid[-1].get("loss")) if valid else None, _finite(last.get("tokens_per_second")),
        _finite(last.get("mfu")), _finite(last.get("seconds_left")) if alive else None, saved[-1] if saved else None,
        tuple(problems.lines),
    )  # fmt: skip


def _finite(value: object) -> float | None:
    """A number that can be shown, as it is; None for anything else that a file may hold in its place."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        return None
    return value


def _heartbeat(run: Path) -> dict[str, Any]:
    """What the run told last; nothing if it has told nothing, or it is over. Raises OSError or ValueError."""
    try:
        told = parse_json((run / HEARTBEAT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(told, dict):
        raise ValueError("it is no object")
    return told


def _alive(run: Path, beat: dict[str, Any]) -> bool:
    """Its lock is held, or its heartbeat is fresh, wherever the run is; on this machine a lock that nobody holds tells
    more than the heartbeat of a run that was killed."""
    held, at = _held(run), _finite(beat.get("time"))
    if held or at is None or time.time() - at >= FRESH:
        return bool(held)
    return held is None or beat.get("host") != socket.gethostname()


def _held(run: Path) -> bool | None:
    """Does a process hold the run's lock? None where that cannot be known."""
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(descriptor)
    return False


def table(found: Sequence[Status]) -> Table:
    """A row for each run."""
    names = ("run", "state", "step", "loss", "validation", "tokens/s", "MFU", "time left", "checkpoint")
    shown = Table(*names, box=None, pad_edge=False, header_style="dim")
    for each in found:
        of = "" if each.train_iters is None else f" / {each.train_iters:,}"
        shown.add_row(
            Text(each.run),
            Text(each.state),
            f"{each.step:,}{of}",
            _number(each.loss, ".4f"),
            _number(each.valid_loss, ".4f"),
            _number(each.tokens_per_second, ",.0f"),
            _number(each.mfu, ".0%"),
            "–" if each.seconds_left is None else duration(each.seconds_left),
            _number(each.checkpoint, ","),
        )
    return shown


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def show(paths: Sequence[Path], *, as_json: bool, watch: bool, console: Console | None = None) -> None:
    """Print the table, once or again and again until Ctrl-C.

    Raises:
        UserError: there is no run.
    """
    runs = find(paths)
    if as_json:
        print(json.dumps([asdict(status(run)) for run in runs], indent=2))
        return
    console = console or PlainConsole(highlight=False)
    if not watch:
        found = [status(run) for run in runs]
        console.print(table(found))
        for line in (line for each in found for line in each.problems):
            console.print(f"note: {line}", markup=False, soft_wrap=True)
        return
    with Live(table([status(run) for run in runs]), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESHED)
            live.update(table([status(run) for run in find(paths)]), refresh=True)
