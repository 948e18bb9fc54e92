"""Starts Python scripts without their imports: a process that has imported what training needs, and forks.

Importing torch, DeepSpeed and megatron-core takes seconds of processor time, and a test of two ranks pays for it twice.
`forked.py` starts one such server per test process and writes requests to its standard input, one JSON object a line:

    {"argv": ["script.py", "argument"], "env": {…}, "cwd": "/tmp/x", "output": "/tmp/x/out", "errors": "/tmp/x/err"}

Each is answered by the process number of the fork that runs the script, and later by that number and its exit code.
The server ends, and all that it started with it, when its standard input does.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

PRELOADED = (
    "deepspeed",
    "megatron.checkpoint.resume",
    "megatron.checkpoint.saver",
    "megatron.data.gpt_dataset",
    "megatron.launch.console",
    "megatron.utils.progress",
    "megatron.launch.worker",
    "megatron.training.trainer",
    "torch._inductor.config",  # torch.use_deterministic_algorithms imports it, and with it all of PyTorch's compiler
    "typer.main",
)


def run(request: dict[str, Any], keep: int) -> None:
    """The life of a fork: becomes the script, and never returns."""
    code = 1
    try:
        os.close(keep)
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        output, errors = (
            os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for name in ("output", "errors")
        )
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        sys.argv = list(request["argv"])
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed while importing is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    # Forks then neither search nor copy what is imported: DeepSpeed collects garbage with every engine.
    gc.collect()
    gc.freeze()
    running: set[int] = set()
    buffer = b""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)

    def answer(**what: int) -> None:
        os.write(answers, json.dumps(what).encode() + b"\n")

    while True:
        if selector.select(0.01):
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, buffer = (buffer + read).split(b"\n")
            for line in lines:
                child = os.fork()
                if child == 0:
                    run(json.loads(line), answers)
                running.add(child)
                answer(started=child)
        for child in sorted(running):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                running.discard(child)
                answer(pid=child, code=os.waitstatus_to_exitcode(status))
    for child in running:
        for kill in (os.killpg, os.kill):  # a fork leads a group of its own once it runs
            with suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
