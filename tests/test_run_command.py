"""Every end of a command gives one line and an exit code."""

import errno
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from permissions import unprivileged, unreadable

from megatron.cli import run_command
from megatron.cli.train import advise_after_interrupt
from megatron.utils.errors import RunError, UserError
from megatron.utils.signals import convert_signals_to_exceptions, exit_on_signal

ROOT = Path(__file__).parents[1]
DEEPY = ROOT / "deepy.py"


def test_an_environment_without_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    shutil.copy(DEEPY, tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # a bare python3
    monkeypatch.setattr("farfield.__main__.start", lambda: None)
    with (
        unprivileged(),
        unreadable(tmp_path / ".venv"),
        pytest.raises(SystemExit, match=rf"^error: {own}: cannot be run \(Permission denied\); use a Python with"),
    ):
        runpy.run_path(str(tmp_path / "deepy.py"))


@pytest.mark.parametrize(
    ("number", "code", "ended"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
    ],
)
@pytest.mark.parametrize(
    ("module", "logged", "timer", "output"),
    [
        ("typer", False, True, ""),
        ("megatron.config.reference", False, True, "stopping\n"),
        ("megatron.config.reference", False, False, "stopping\n"),
        ("megatron.config.reference", True, True, "stopping\n"),
    ],
)
def test_signals_during_an_import(
    number: signal.Signals, code: int, ended: str, module: str, logged: bool, timer: bool, output: str, tmp_path: Path
) -> None:
    """Signals are handled before `main` and during imports in a command; torch's import must not be interrupted.

    Args:
        logged: True if descriptor 2 is redirected, as it is to a log during computation.
        timer: False if the command ends before the signal is repeated, as on a busy machine.
    """
    script = (
        "import os, runpy, sys, threading, time\n"
        f"if not {timer}: threading.Timer.start = lambda self: None\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            if {logged}: os.dup2(os.open('log', os.O_WRONLY | os.O_CREAT), 2)\n"
        "            try:\n"
        f"                os.kill(os.getpid(), {int(number)})\n"
        "                time.sleep(0.1)\n"
        "            except BaseException:\n"
        "                print('broken off')\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        f"sys.argv, sys.path[0] = ['./deepy.py', 'keys'], {str(ROOT)!r}\n"
        f"runpy.run_path({str(DEEPY)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if module == "typer":  # before `main`
        ended = ended.replace("\n", " before any work; nothing was changed\n")
    reported = output if logged else output + ended
    assert (done.returncode, done.stderr) == (code, reported)
    assert "broken off" not in done.stdout


def fails(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        with run_command.pass_errors_through():
            raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "reported"),
    [
        (UserError("a is b"), 2, "error: a is b\n"),
        (RunError("a\nb"), 1, "error: a\nerror: b\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_are_lines(
    error: BaseException, code: int, reported: str, capfd: pytest.CaptureFixture[str], app
) -> None:
    assert app(fails(error)) == code
    assert capfd.readouterr() == ("", reported)


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_command_that_calls_exit_is_not_silent(code: int | None, capfd: pytest.CaptureFixture[str], app) -> None:
    """A method's file or a library may call it; exit code 0 would look like success."""
    assert app(fails(SystemExit(code))) == 1
    assert re.fullmatch(r"error: .*: sys\.exit\(\d?\) was called while a command ran; .*\n", capfd.readouterr().err)


@pytest.mark.parametrize("error", [EOFError("ends too early"), OSError(5, "Input/output error", "a.bin")])
def test_unexpected_errors_are_not_interrupts(error: BaseException, capfd: pytest.CaptureFixture[str], app) -> None:
    assert app(fails(error)) == 1
    line = capfd.readouterr().err
    assert line.startswith(f"error: {type(error).__name__}: ")
    log = Path(line.rpartition(" ")[2].strip())
    assert type(error).__name__ in log.read_text().splitlines()[-1]
    log.unlink()


def test_a_machine_without_a_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], app
) -> None:
    """In a read-only container errors are one line too, although their traceback cannot be written."""

    def draw() -> None:
        with run_command.pass_errors_through():
            try:
                tempfile.mkdtemp()
            except OSError as error:  # as matplotlib
                raise OSError("a writable cache directory is required") from error

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", None)
        patch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc", "/sys/kernel"])
        codes = [app(draw), app(fails(EOFError("ends too early")))]
    assert codes == [1, 1]
    first, second = capfd.readouterr().err.splitlines()
    remedy = "set TMPDIR to a writable folder with free space"
    assert first == f"error: temporary files cannot be written to /proc, /sys/kernel; {remedy}"
    assert second.startswith("error: EOFError: ends too early; the traceback cannot be written (No usable temporary")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_with_the_file(number: int, capfd: pytest.CaptureFixture[str], app) -> None:
    assert app(fails(OSError(number, os.strerror(number), "out/log.txt"))) == 1
    assert capfd.readouterr().err == f"error: out/log.txt: cannot be written ({os.strerror(number)})\n"
    assert app(fails(OSError(number, os.strerror(number)))) == 1
    assert capfd.readouterr().err == f"error: standard output: {os.strerror(number)}\n"


@pytest.mark.parametrize(("place", "code"), [("/dev/full", 1), ("a pipe", 141)])
def test_standard_output_that_cannot_be_written_while_a_command_runs(place: str, code: int, tmp_path: Path) -> None:
    """Failing standard output is reported during a command too; typer silently exits with 1 for a closed pipe."""
    script = (
        "import sys, typer\n"
        "from megatron.cli import run_command as command\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def write() -> None:\n"
        "    with command.pass_errors_through():\n"
        "        print('a' * 100_000, flush=True)\n"
        "sys.exit(command.run_command(app, 'test'))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(place if place.startswith("/") else writer, "w") as output:
        if place.startswith("/"):
            os.close(writer)
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60
        )
    said = "error: standard output: No space left on device\n" if code == 1 else ""
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "1>&-", "2<run.sh"])
def test_closed_streams_are_redirected_in_children(closed: str, tmp_path: Path) -> None:
    """Closed streams are redirected to /dev/null, also in children.

    This includes descriptors left by the shell: bash leaves its script at a closed standard error.
    """
    script = (
        "import os, subprocess, sys, typer\n"
        "from megatron.cli import run_command as command\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def write() -> None:\n"
        "    print('out', flush=True)\n"
        "    print('err', file=sys.stderr, flush=True)\n"
        "    code = 'import os; [os.write(number, b\"child\") for number in (1, 2)]'\n"
        f"    open({str(tmp_path / 'opened')!r}, 'w').write('opened')\n"
        "    sys.exit(subprocess.run([sys.executable, '-c', code]).returncode)\n"
        "sys.exit(command.run_command(app, 'test'))\n"
    )
    (tmp_path / "run.sh").write_text("nothing")
    run_command = f"cd {tmp_path}; PYTHONPATH={ROOT} {sys.executable} -c {shlex.quote(script)} {closed}"
    done = subprocess.run(["bash", "-c", run_command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout == ("out\nchild" if "1>" not in closed and " >" not in f" {closed}" else "")
    assert done.stderr == ("err\nchild" if closed == "1>&-" else "")
    assert (tmp_path / "opened").read_text() == "opened"
    assert (tmp_path / "run.sh").read_text() == "nothing"


def test_help_with_a_closed_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        done = subprocess.run([sys.executable, DEEPY, "--help"], stdout=output, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_before_the_first_checkpoint_says_how_to_start_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved" / "checkpoints" / "step_0000004").mkdir(parents=True)
    for save, is_advised in ((None, True), (str(tmp_path / "new"), True), (str(tmp_path / "saved"), False)):
        with pytest.raises(KeyboardInterrupt), advise_after_interrupt(save):
            raise KeyboardInterrupt
        expected = "no checkpoint saved; run the same command to start again\n" if is_advised else ""
        assert capfd.readouterr().err == expected
    with advise_after_interrupt(None):
        pass
    assert capfd.readouterr().err == ""


def test_other_signal_handlers_are_kept() -> None:
    """Signal handlers of a program that calls our training are preserved."""
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    mine = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, exit_on_signal)
    try:
        with convert_signals_to_exceptions(replacing=(exit_on_signal,)):
            assert signal.getsignal(signal.SIGTERM) is mine
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is exit_on_signal
    finally:
        signal.signal(signal.SIGTERM, own)
        signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def app() -> Callable[[Callable[[], None]], int]:
    def run(body: Callable[[], None]) -> int:
        made = typer.Typer(pretty_exceptions_enable=False)
        made.command()(body)
        before, sys.argv = sys.argv, ["test"]
        hook = sys.unraisablehook
        try:
            return run_command.run_command(made, "test")
        finally:
            sys.argv, sys.unraisablehook = before, hook

    return run
