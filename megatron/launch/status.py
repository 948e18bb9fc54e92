"""`./deepy.py status RUN…`: how far runs are, from the files in their folders alone. Without torch."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megatron.checkpoint import folder
from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.run_files import config_file
from megatron.config.load import read
from megatron.errors import FarfieldError, UserError
from megatron.launch.console import PlainConsole
from megatron.quantities import duration
from megatron.training.records import HEARTBEAT, METRICS, damage_in, lines, unreadable

FRESH = 60.0
"""Seconds: a run on another machine whose heartbeat is older is not alive."""
REFRESHED = 5.0
"""Seconds between two looks."""


@dataclass(frozen=True)
class Status:
    """A run as its folder shows it; None for what is not known."""

    run: str
    state: str
    """training (with its phase), finished, stopped."""
    step: int
    train_iters: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    checkpoint: int | None
    """The step of the last one."""


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs that are meant: folders of runs, or folders that hold such.

    Raises:
        UserError: there is none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
        found_in = (file.parent for name in (folder.CONFIG, LOCK) for file in path.rglob(name))
        runs = [path] if _is_run(path) else sorted(set(found_in))
        runs = [run for run in runs if _is_run(run) and folder.CHECKPOINTS not in run.parts[len(path.parts) :]]
        if not runs:
            raise UserError(f"{path}: no run in it")
        found += [run for run in runs if run not in found]
    return found


def _is_run(path: Path) -> bool:
    """It takes the lock before all else."""
    return any((path / name).exists() for name in (LOCK, METRICS, HEARTBEAT, folder.CHECKPOINTS))


def status(run: Path) -> Status:
    """How far a run is."""
    records = [record for _, record in lines(run / METRICS)] if (run / METRICS).is_file() else []
    train = [record for record in records if record.get("kind") == "train"]
    valid = [record for record in records if record.get("kind") == "valid"]
    last: dict[str, Any] = train[-1] if train else {}
    saved = [number for each in folder.checkpoints(run) if (number := folder.step_of(each)) is not None]
    beat = _heartbeat(run)
    alive = _alive(run, beat)
    try:
        train_iters = read(config_file(run)).training.train_iters
    except FarfieldError:
        train_iters = None
    steps = [last.get("step", 0), *saved, *([beat.get("step", 0)] if alive else [])]
    step = max(steps)
    state = "stopped"
    if alive:
        state = str(beat.get("phase", "starting"))
    elif train_iters is not None and step >= train_iters:
        state = "finished"
    return Status(
        str(run), state, step, train_iters, last.get("loss"), valid[-1].get("loss") if valid else None,
        last.get("tokens_per_second"), last.get("mfu"), last.get("seconds_left") if alive else None,
        saved[-1] if saved else None,
    )  # fmt: skip


def _heartbeat(run: Path) -> dict[str, Any]:
    try:
        told = json.loads((run / HEARTBEAT).read_text(encoding="utf-8"))
        return told if isinstance(told, dict) else {}
    except (OSError, ValueError):
        return {}


def _alive(run: Path, beat: dict[str, Any]) -> bool:
    """Its lock is held, or its heartbeat is fresh, wherever the run is; on this machine a lock that nobody holds tells
    more than the heartbeat of a run that was killed."""
    held, at = _held(run), beat.get("time")
    if held or not isinstance(at, int | float) or time.time() - at >= FRESH:
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
            each.run,
            each.state,
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
        console.print(table([status(run) for run in runs]))
        for run in runs:
            if damaged := unreadable(run / METRICS):
                console.print(f"note: {damage_in(run / METRICS, damaged)}", markup=False, soft_wrap=True)
        return
    with Live(table([status(run) for run in runs]), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESHED)
            live.update(table([status(run) for run in find(paths)]), refresh=True)
