"""Running a `./deepy.py` command in a subprocess: stopping it early, and interpreting its exit."""

import subprocess
from collections.abc import Iterable
from typing import Any

from megatron.utils.errors import FarfieldError, RunError, UserError


def stop_child(child: subprocess.Popen[Any]) -> None:
    """Stop a running command when its parent exits; a training first saves after its current step."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        for _ in child.stdout or ():  # a child whose pipe is not read does not exit
            pass
        child.wait()
    except BaseException:  # a second signal
        child.kill()
        child.wait()
        raise


def build_command_error(code: int, lines: Iterable[str], otherwise: str) -> FarfieldError:
    """Build an error of the right class from a failed command's own error lines.

    Args:
        code: exit code of the command.
        lines: its output.
        otherwise: message if it printed no error.
    """
    errors = [line.strip().removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = "; ".join(errors) if errors else otherwise
    return UserError(message) if code == UserError.exit_code and errors else RunError(message)
