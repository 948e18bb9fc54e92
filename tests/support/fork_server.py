"""Starts Python scripts without their imports: a process that has imported what training needs, and forks.

Importing torch, DeepSpeed and megatron-core takes seconds of processor time, and a test of two ranks pays for it twice.
`forked.py` starts such a server and connects to it once for each script:

    {"argv": ["script.py", "argument"], "env": {…}, "cwd": "/tmp/x"}    with the three standard streams beside it

It is answered by the process number of the fork that runs the script, and later by its exit code.
What a fork starts by `python SCRIPT.py`, by `python -m MODULE` or as a script whose first line names this Python is a
fork of it in turn: a launcher's ranks, a sweep's trainings. Any other command is started as always.
A fork ends when its connection does, and the server, with all forks that it started, when its standard input does.

A fork is not quite a process of Python's: it finds all modules that the server finds, it ends without exit handlers and
without waiting for threads, and an uncaught error is printed with the server's frames. What depends on these is tested
with processes as users start them.
"""

import asyncio
import gc
import importlib
import inspect
import json
import math
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

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


def become_script(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    streams: Sequence[int],
    pass_fds: Sequence[int] = (),
) -> NoReturn:
    """The life of a fork: becomes the script, or with `-m` the module, and never returns. Signals may be blocked.

    Args:
        argv: the script and its arguments.
        environment: all of it.
        folder: where it runs; where its parent does if None.
        streams: the descriptors of its standard input, output and errors.
        pass_fds: other descriptors that it may use.
    """
    code = 1
    try:
        # What the parent still holds must not close a number that this process opens anew.
        gc.freeze()
        reset_process_groups()
        asyncio.set_event_loop_policy(None)  # the parent's loop is its own
        reset_seeds()
        for number, stream in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(stream, number)
        reset_signals()  # what they end is told there
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in pass_fds:
                with suppress(OSError):
                    os.close(descriptor)
        if folder is not None:
            os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        _inputs_of_parents.append(sys.stdin)  # its end would wait for a thread of the parent that reads it
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as Python ends
    os._exit(code)


_inputs_of_parents: list[object] = []


def reset_signals() -> None:
    """What the parent had prepared for signals is not for its fork: handlers, and what they remove and print."""
    from megatron.utils import signals

    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    signals._cleanups.clear()
    signals._active_stops.clear()
    signals._exception_raised.clear()
    signals._standard_error, signals._forced_exit_descriptor = None, -1
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_process_groups() -> None:
    """The parent may have met itself, to build a model; the threads of that group are not in its fork."""
    if "torch.distributed" not in sys.modules:
        return
    from torch.distributed import distributed_c10d

    from megatron.distributed.megatron_core import parallel_state

    _groups_of_parents.append(distributed_c10d._world)  # their end would wait for those threads
    distributed_c10d._world = distributed_c10d._World()
    parallel_state.destroy_model_parallel()


_groups_of_parents: list[object] = []


def reset_seeds() -> None:
    """Two processes of Python's do not draw the same numbers."""
    if "torch" not in sys.modules:
        return
    import numpy
    import torch

    torch.default_generator.seed()
    numpy.random.seed()


DEFAULT_PARAMETERS = {
    **{"preexec_fn": None, "executable": None, "shell": False, "gid": None, "gids": None, "uid": None},
    **{"umask": -1, "process_group": -1},
}
"""Parameters of a child that no fork can have otherwise."""


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen, but what would start this Python with a script or a module is a fork, which has its imports."""

    def _execute_child(self, *arguments: Any) -> None:  # of subprocess.Popen
        parameters = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        argv = _list_script_words(parameters["args"])
        if argv is None or any(parameters[name] != value for name, value in DEFAULT_PARAMETERS.items()):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = [parameters[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        reader, writer = os.pipe()
        # No handler of the parent's may answer what is sent to its fork.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                if parameters["start_new_session"]:
                    os.setsid()
                os.close(writer)
                streams = [number if stream == -1 else stream for number, stream in enumerate(streams)]
                environment = os.environ if parameters["env"] is None else parameters["env"]
                become_script(argv, dict(environment), parameters["cwd"], streams, parameters["pass_fds"])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._child_created = True
        os.close(writer)
        os.read(reader, 1)  # it leads its session by now
        os.close(reader)
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(parameters[name] for name in names))  # type: ignore[attr-defined]


def _list_script_words(command: Any) -> list[str] | None:
    """SCRIPT.py, `-m MODULE` or an executable script with its arguments, if a command starts that with this Python."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    program, *words = map(os.fsdecode, command)
    if program != sys.executable:
        path = shutil.which(program)
        return [path, *words] if path is not None and _is_script(path) else None
    if words[:1] == ["-P"]:
        words = words[1:]
    return words if words and (words[0] == "-m" or words[0].endswith(".py")) else None


def _is_script(path: str) -> bool:
    """Does a file begin with the line that makes it a script of this Python?"""
    line = f"#!{sys.executable}\n".encode()
    with open(path, "rb") as file:
        return file.read(len(line)) == line


def become_requested_script(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become what is asked for, in a session of its own: a terminal that is opened then is the session's."""
    os.setsid()
    os.chdir(request["cwd"])
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    become_script(request["argv"], request["env"], None, streams)


def serve(
    listener: socket.socket, become: Callable[[Mapping[str, Any], Sequence[int]], object], *, grace: float
) -> None:
    """Fork for each connection, until standard input ends. Forks neither search nor copy what is there by now.

    Ctrl-C is for the forks: it does not end the server.

    Args:
        listener: the socket, in a folder of its own, which goes with the server.
        become: what a fork does with a request and three streams. It ends in that, or returns from here afterwards.
        grace: seconds that a fork has to end by itself when its connection ends, or the server does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.enable()
    running: dict[int, socket.socket] = {}
    deadlines: dict[int, float] = {}
    is_ending = False
    selector = selectors.DefaultSelector()
    for source in (0, listener):
        selector.register(source, selectors.EVENT_READ)
    while running or not is_ending:
        ready = [key.fileobj for key, _ in selector.select(0.01 if running else None)]
        now = time.monotonic()
        if 0 in ready:
            is_ending = True
            selector.unregister(0)
            selector.unregister(listener)
            deadlines = dict.fromkeys(running, now + grace) | deadlines
        for child, connection in list(running.items()):
            if connection in ready:  # who asked for it is gone
                selector.unregister(connection)
                deadlines.setdefault(child, now + grace)
            if now >= deadlines.get(child, math.inf):
                _kill(child)
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                del running[child]
                with suppress(KeyError):
                    selector.unregister(connection)
                _answer(connection, code=os.waitstatus_to_exitcode(status))
                connection.close()
        if listener in ready and not is_ending:
            connection, _ = listener.accept()
            request, streams = _receive_request(connection)
            if request is None:
                connection.close()
                continue
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the fork has its handlers
            child = os.fork()
            if child == 0:
                for other in (listener, connection, *running.values()):
                    other.close()
                become(request, streams)
                return
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for stream in streams:
                os.close(stream)
            running[child] = connection
            selector.register(connection, selectors.EVENT_READ)
            _answer(connection, started=child)
    remove_socket(listener)


def _receive_request(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A request and its streams; None if who asks ends before it has said what."""
    data, streams, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            for stream in streams:
                os.close(stream)
            return None, []
        data += more
    return json.loads(data), streams


def remove_socket(listener: socket.socket) -> None:
    """With its folder, which `ForkServer` made; who started the server may be gone."""
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)


def _answer(connection: socket.socket, **what: int) -> None:
    with suppress(OSError):  # who asked is gone
        connection.sendall(json.dumps(what).encode() + b"\n")


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):  # a fork leads a group of its own once it runs
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def main() -> None:
    """Serve on the socket whose descriptor is the argument, with all imported when somebody first connects. The project
    is in the current folder."""
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    if 0 not in select.select([0, listener], [], [])[0]:
        gc.disable()  # to search again and again what is imported takes a sixth of the time
        for name in PRELOADED:
            importlib.import_module(name)
        serve(listener, become_requested_script, grace=0)
    else:
        remove_socket(listener)


if __name__ == "__main__":
    main()
