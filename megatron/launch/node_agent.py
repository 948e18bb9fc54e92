"""The ranks of one machine, for a launcher at the other end of standard input (`ssh_launcher.py`).

The first line is the `LaunchRequest`. Then TERM asks the ranks to save and end, KILL ends them at once, and so does
TERM after TERM; the end of the input means TERM, for nobody is there any more. An error is left on standard error as a
line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

from megatron.config.load import read_config
from megatron.distributed.launcher_environment import RankInfo
from megatron.launch.rank_group import run_ranks
from megatron.launch.ssh_launcher import LaunchRequest
from megatron.launch.worker import serialize_error
from megatron.utils.errors import FarfieldError, RunError


def _read_control_channel(control_channel: BinaryIO) -> None:
    """Turn what comes into signals to this process, whose launcher part hands them on to the ranks."""
    stop_requested = False
    for line in control_channel:
        if (word := line.strip()) == b"TERM" and not stop_requested:
            stop_requested = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif word == b"KILL":
            # The second signal is the one that does not wait. Two of the same might arrive as one.
            for number in (signal.SIGINT,) if stop_requested else (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            return
    if not stop_requested:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Read the request, run the ranks; 0, 128 + n after signal n, or the exit code of an error."""
    request = LaunchRequest(**json.loads(sys.stdin.buffer.readline()))
    try:
        return _run_ranks(request)
    except FarfieldError as error:
        print(json.dumps(serialize_error(error)), file=sys.stderr, flush=True)
        return error.exit_code


def _run_ranks(request: LaunchRequest) -> int:
    log = Path(request.log)
    try:
        os.chdir(request.folder)
        if not log.is_file():
            raise FileNotFoundError(2, "not there")
    except OSError as error:
        host = os.uname().nodename
        content = request.folder if error.filename else log
        raise RunError(f"{host}: {content}: {error.strerror}; all machines must see the same folders") from error
    os.environ.update(request.environment)
    with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".yml", encoding="utf-8") as file:
        file.write(request.configuration)
        file.flush()
        config = read_config(file.name)
    # The signals of the control channel find the handlers of run_processes, or, a moment before, end this process:
    # nothing runs.
    threading.Thread(target=_read_control_channel, args=(sys.stdin.buffer,), daemon=True).start()
    rank_infos = [RankInfo(**rank_info) for rank_info in request.rank_infos]
    return run_ranks(config, log, rank_infos, request.address, request.port)


if __name__ == "__main__":
    # os._exit: the thread may hold standard input, which the interpreter would wait for.
    code = main()
    sys.stdout.flush()
    os._exit(code)
