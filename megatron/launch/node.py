"""The ranks of one machine, for a launcher at the other end of standard input (`nodes.py`): `python -m …node`.

The first line is the order. Then TERM asks the ranks to save and end, KILL ends them at once, and so does TERM after
TERM; the end of the input means TERM, for nobody is there any more. An error is left on standard error as a line of
JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

from megatron.config.load import read
from megatron.distributed.place import Place
from megatron.errors import FarfieldError, RunError
from megatron.launch.processes import run_processes
from megatron.launch.worker import report


def _listen(lifeline: BinaryIO) -> None:
    """Turn what comes into signals to this process, whose launcher part hands them on to the ranks."""
    asked = False
    for line in lifeline:
        if (word := line.strip()) == b"TERM" and not asked:
            asked = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif word == b"KILL":
            # The second signal is the one that does not wait. Two of the same might arrive as one.
            for number in (signal.SIGINT,) if asked else (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            return
    if not asked:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Read the order, run the ranks; 0, 128 + n after signal n, or the exit code of an error."""
    order = json.loads(sys.stdin.buffer.readline())
    try:
        return _run(order)
    except FarfieldError as error:
        print(json.dumps(report(error)), file=sys.stderr, flush=True)
        return error.exit_code


def _run(order: dict[str, Any]) -> int:
    log = Path(order["log"])
    try:
        os.chdir(order["folder"])
        if not log.is_file():
            raise FileNotFoundError(2, "not there")
    except OSError as error:
        host = os.uname().nodename
        what = order["folder"] if error.filename else log
        raise RunError(f"{host}: {what}: {error.strerror}; all machines must see the same folders") from error
    os.environ.update(order["environment"])
    with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".yml", encoding="utf-8") as file:
        file.write(order["configuration"])
        file.flush()
        config = read(file.name)
    # The lifeline's signals find the handlers of run_processes, or, a moment before, end this process: nothing runs.
    threading.Thread(target=_listen, args=(sys.stdin.buffer,), daemon=True).start()
    places = [Place(**place) for place in order["places"]]
    return run_processes(config, log, places, order["address"], order["port"])


if __name__ == "__main__":
    # os._exit: the thread may hold standard input, which the interpreter would wait for.
    code = main()
    sys.stdout.flush()
    os._exit(code)
