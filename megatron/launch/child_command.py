"""A command of `./deepy.py` in a process of its own: how it is ended early, and what its end says."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.utils.errors import FarfieldError, RunError, UserError

DEEPY = Path(__file__).resolve().parents[2] / "deepy.py"


def stop_child(child: subprocess.Popen[Any]) -> None:
    """End a command that still runs when its parent is leaving: a training saves after its step, however long that
    takes."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        for _ in child.stdout or ():  # a child whose pipe nobody reads does not end
            pass
        child.wait()
    except BaseException:  # a second signal
        child.kill()
        child.wait()
        raise


def build_command_error(code: int, lines: Iterable[str], otherwise: str) -> FarfieldError:
    """A failed command's own error lines, with their kind.

    Args:
        code: its exit code.
        lines: what it printed.
        otherwise: the message if it printed no error.
    """
    errors = [line.strip().removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = "; ".join(errors) if errors else otherwise
    return UserError(message) if code == UserError.exit_code and errors else RunError(message)
