"""A training as a process of its own: started, watched and ended.

It is `./deepy.py train FILE`, so no run inherits another's state, and any can be repeated by hand.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.signals import get_parent_variable

DEEPY = Path(__file__).resolve().parents[2] / "deepy.py"
POLL_SECONDS = 0.2


def train_in_subprocess(configuration: Path, printed: Path, metrics: Path, watch: Callable[[int | None], None]) -> None:
    """Train to the end.

    Args:
        configuration: the run's whole configuration, a file.
        printed: where what the training prints goes.
        metrics: the run's metrics.jsonl.
        watch: called now and then with the newest step that this training recorded, None before the first.

    Raises:
        UserError, RunError: what the training ended with.
    """
    with open(printed, "w", encoding="utf-8") as file:
        begun = time.time()
        child = subprocess.Popen(
            [sys.executable, str(DEEPY), "train", str(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **get_parent_variable()},  # it ends with this process, however that goes
            start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
        )
        try:
            while child.poll() is None:
                watch(read_last_step(metrics, begun))
                time.sleep(POLL_SECONDS)
        finally:
            _stop_child(child)
    if child.returncode != 0:
        raise _describe_failure(child.returncode, printed)


def read_last_step(metrics: Path, since: float) -> int | None:
    """The newest step in a run's metrics.jsonl, if that was written since a point in time."""
    try:
        if metrics.stat().st_mtime < since:
            return None
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 14)))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line end is still being written
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(parse_json(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _stop_child(child: subprocess.Popen[bytes]) -> None:
    """End a training that still runs when the sweep is leaving: it saves after its step, however long that takes."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait()
    except BaseException:  # asked a second time
        child.kill()
        child.wait()
        raise


def _describe_failure(code: int, printed: Path) -> FarfieldError:
    """A failed training's own error line, with its kind."""
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = "; ".join(errors) if errors else f"training ended with exit code {code}; its output is in {printed}"
    return UserError(message) if code == UserError.exit_code and errors else RunError(message)
