"""Signals are acknowledged immediately, and stop a run in good order."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.utils.signals import HANDLED_SIGNALS, GracefulStop, acknowledge_signals


@pytest.mark.parametrize("number", HANDLED_SIGNALS)
def test_the_first_is_acknowledged_while_the_main_thread_is_busy_in_c(number: signal.Signals) -> None:
    """The first signal is acknowledged while the main thread is busy in C.

    The main thread waits in C for a lock that only the acknowledgement opens, so no Python handler could run there.
    """
    libc, lock, output = ctypes.CDLL(None), ctypes.create_string_buffer(64), []

    def say(line: str) -> None:
        output.append(line)
        libc.pthread_mutex_unlock(lock)

    rescue = threading.Timer(20, lambda: libc.pthread_mutex_unlock(lock))
    rescue.start()
    threading.Timer(0.05, lambda: os.kill(os.getpid(), number)).start()
    with GracefulStop(say) as stop:
        for _ in range(2):
            libc.pthread_mutex_lock(lock)
        reported = list(output)
        rescue.cancel()
    assert reported == ["stopping after this step; repeat to stop immediately"]
    assert stop.signal == number


def test_a_second_ends_at_once() -> None:
    with GracefulStop() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.signal == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_ends_a_process_that_is_busy_in_c() -> None:
    """A second signal ends a process that is busy in C.

    A fork waits there for a lock that is never released, as in a long step.
    """
    child = os.fork()
    if child == 0:
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        with GracefulStop(lambda line: None):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            threading.Timer(20, os._exit, (1,)).start()
            for _ in range(2):
                libc.pthread_mutex_lock(lock)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM


def test_a_repeated_hangup_signal() -> None:
    with GracefulStop() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal == signal.SIGHUP


def test_ignored_signals_stay_ignored() -> None:
    """Ignored signals stay ignored (nohup)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_everything_is_put_back() -> None:
    before = [signal.getsignal(number) for number in HANDLED_SIGNALS]
    threads = threading.active_count()
    with GracefulStop(print), acknowledge_signals(print, "stopping"):
        pass
    assert [signal.getsignal(number) for number in HANDLED_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() <= threads  # a timer of an earlier test may have ended since


PATIENT = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from megatron.utils.signals import clean_up_on_signal, convert_signals_to_exceptions
left = sys.argv[1]
open(left, "w").close()
with convert_signals_to_exceptions(), clean_up_on_signal(lambda: os.unlink(left)):
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    threading.Timer(0.3, print, ("busy",), dict(flush=True)).start()  # when the main thread is there
    for _ in range(2):
        libc.pthread_mutex_lock(lock)  # in C, for good
"""


@pytest.mark.parametrize(("number", "output"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")])
def test_a_process_busy_in_c_code_ends(number: int, output: str, tmp_path: Path) -> None:
    """A process that is busy in C and has nothing to save ends too.

    Examples are training a tokenizer and importing torch, where an exception would be delayed by seconds.
    """
    left = tmp_path / "left"
    code = PATIENT.format(root=str(Path(__file__).parents[2]))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(left)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "busy\n"
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert errors == f"{output}\n"
    assert not left.exists()
