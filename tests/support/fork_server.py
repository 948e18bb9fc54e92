"""Server that runs Python scripts without their imports: a process that has imported the training code, and forks.

Importing torch, DeepSpeed and megatron-core takes seconds of CPU time, and a test of two ranks would pay this twice.
`forked.py` starts such a server and connects to it once for each script:

    {"argv": ["script.py", "argument"], "env": {…}, "cwd": "/tmp/x"}    with the three standard streams attached

The answer is the process ID of the fork that runs the script, and later its exit code.
A process that a fork starts with `python SCRIPT.py`, with `python -m MODULE`, or as a script whose first line names
this Python becomes a fork in turn: a launcher's ranks, a sweep's trainings. Other commands start normally.
A fork ends when its connection closes. The server and all its forks end when its standard input closes.

A fork differs from a normal Python process: it has all modules of the server, it exits without exit handlers and
without waiting for threads, and uncaught errors show the server's frames. Code that depends on this is tested with
normal processes.
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
    "megatron.utils.console",
    "megatron.utils.progress",
    "megatron.launch.worker",
    "megatron.training.train",
    "torch._inductor.config",  # torch.use_deterministic_algorithms imports it with all of PyTorch's compiler
    "typer.main",
)


def become_script(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    streams: Sequence[int],
    pass_fds: Sequence[int] = (),
) -> NoReturn:
    """Run the script, or with `-m` the module, in a fork; never return. Signals may be blocked.

    Args:
        argv: script and its arguments.
        environment: complete environment.
        folder: working folder; None keeps the parent's.
        streams: file descriptors of standard input, output and error.
        pass_fds: other file descriptors to keep open.
    """
    code = 1
    try:
        # Objects of the parent must not close a descriptor that this process reuses.
        gc.freeze()
        reset_process_groups()
        asyncio.set_event_loop_policy(None)  # the parent's event loop must not be used
        reset_seeds()
        for number, stream in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(stream, number)
        reset_signals()  # signals end the script here
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in pass_fds:
                with suppress(OSError):
                    os.close(descriptor)
        if folder is not None:
            os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        _inputs_of_parents.append(sys.stdin)  # its destructor would wait for a parent's thread that reads it
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
            code = code or 120  # as Python exits
    os._exit(code)


_inputs_of_parents: list[object] = []


def reset_signals() -> None:
    """Reset signal handlers of the parent, including cleanup and messages at exit."""
    from megatron.utils import signals

    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by the server
    signals._cleanups.clear()
    signals._active_stops.clear()
    signals._exception_raised.clear()
    signals._standard_error, signals._forced_exit_descriptor = None, -1
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_process_groups() -> None:
    """Drop process groups of the parent, which may have joined itself to build a model; its threads are not in the
    fork.
    """
    if "torch.distributed" not in sys.modules:
        return
    from torch.distributed import distributed_c10d

    from megatron.distributed.process_groups import parallel_state

    _groups_of_parents.append(distributed_c10d._world)  # their destructors would wait for those threads
    distributed_c10d._world = distributed_c10d._World()
    parallel_state.destroy_model_parallel()


_groups_of_parents: list[object] = []


def reset_seeds() -> None:
    """Reseed random generators, as in separate Python processes."""
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
"""Process parameters that a fork cannot change."""


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Replacement of subprocess.Popen that forks if the command starts this Python with a script or a module."""

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
        # No signal handler of the parent may run in the fork.
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
    """Return SCRIPT.py, `-m MODULE` or an executable script with arguments if the command starts it with this
    Python.
    """
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
    """Return True if a file starts with this Python's shebang line."""
    line = f"#!{sys.executable}\n".encode()
    with open(path, "rb") as file:
        return file.read(len(line)) == line


def become_requested_script(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run the requested script in its own session, which gets any terminal opened later."""
    os.setsid()
    os.chdir(request["cwd"])
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    become_script(request["argv"], request["env"], None, streams)


def serve(
    listener: socket.socket, become: Callable[[Mapping[str, Any], Sequence[int]], object], *, grace: float
) -> None:
    """Fork for each connection until standard input closes. Forks neither collect nor copy existing objects.

    Ctrl-C reaches the forks and does not end the server.

    Args:
        listener: socket in its own folder, which is removed with the server.
        become: function that handles a request and three streams in the fork. It may return at the end.
        grace: seconds for a fork to end after its connection or the server closes.
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
            if connection in ready:  # the client has disconnected
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
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the fork unblocks them
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
    """Return a request and its streams; None if the client disconnects first."""
    data, streams, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            for stream in streams:
                os.close(stream)
            return None, []
        data += more
    return json.loads(data), streams


def remove_socket(listener: socket.socket) -> None:
    """Remove the socket and its folder, made by `ForkServer`, whose process may have ended."""
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)


def _answer(connection: socket.socket, **what: int) -> None:
    with suppress(OSError):  # the client has disconnected
        connection.sendall(json.dumps(what).encode() + b"\n")


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):  # a running fork leads its own group
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def main() -> None:
    """Serve on the socket with the descriptor given as argument, with all imports done when a client first connects.

    The project is in the current folder.
    """
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    if 0 not in select.select([0, listener], [], [])[0]:
        gc.disable()  # repeated collections of imported modules take a sixth of the time
        for name in PRELOADED:
            importlib.import_module(name)
        serve(listener, become_requested_script, grace=0)
    else:
        remove_socket(listener)


if __name__ == "__main__":
    main()
