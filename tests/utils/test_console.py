"""The user's console stays clean; the log contains everything."""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from megatron.utils.console import UnexpectedError, log_traceback, print_table, run_console, temporary_log
from megatron.utils.errors import UserError


def test_output_of_libraries_goes_to_the_log(tmp_path: Path, capfd):
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    with run_console(log) as console:
        print("python noise")
        print("python error noise", file=sys.stderr)
        os.write(1, b"C noise\n")
        os.write(2, b"C error noise\n")
        subprocess.run(["echo", "child noise"], check=True)
        console.print("for the user: [bold]step 1[/]")
    print("after")
    out, err = capfd.readouterr()
    assert out == "for the user: step 1\nafter\n"
    assert err == ""
    text = log.read_text()
    assert text.startswith("before\n")
    for line in (
        "python noise",
        "python error noise",
        "C noise",
        "C error noise",
        "child noise",
        "for the user: step 1",
    ):
        assert line in text
    assert "after" not in text


def test_a_log_on_a_full_disk_does_not_end_the_work(capfd):
    """The log is a copy: a note is printed once, and the work and its errors are unaffected."""
    log = Path("/dev/full")

    def work() -> None:
        with run_console(log) as console, log_traceback(log):
            console.print("step 1")
            print("python noise", flush=True)
            console.print("step 2")
            raise ValueError("no")

    problem = r"the traceback cannot be written to /dev/full \(No space left on device\)"
    with pytest.raises(UnexpectedError, match=rf"^ValueError: no; {problem}$"):
        work()
    out, err = capfd.readouterr()
    note = "note: /dev/full is incomplete from here: No space left on device"
    assert sorted(out.splitlines()) == [note, "step 1", "step 2"]
    assert err == ""


def test_streams_are_restored_after_an_error(tmp_path: Path, capfd):
    def fail() -> None:
        with run_console(tmp_path / "log.txt"):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    os.write(1, b"back\n")
    assert capfd.readouterr().out == "back\n"


def test_silent_ranks_reach_the_log_alone(tmp_path: Path, capfd):
    log = tmp_path / "log.txt"
    with run_console(log, silent=True) as console:
        console.print("rank 1 says")
    assert capfd.readouterr().out == ""
    assert "rank 1 says" in log.read_text()


def test_live_progress_is_not_logged_line_by_line(tmp_path: Path, capfd, monkeypatch):
    from rich.progress import Progress

    monkeypatch.setenv("TERM", "xterm")
    log = tmp_path / "log.txt"
    with run_console(log) as console:
        console._force_terminal = console.is_interactive = True  # as on a terminal
        with Progress(console=console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task("steps", total=5)
            for _ in range(5):
                progress.advance(task)
                progress.refresh()
            print("noise beside the bar")
            console.print("a line")
    out = capfd.readouterr().out
    assert out.count("steps") >= 5
    assert "noise" not in out
    assert "noise" in log.read_text()
    assert "steps" not in log.read_text()
    assert "a line" in log.read_text()


def test_temporary_log_stays_only_for_a_traceback():
    with temporary_log() as log:
        assert log.exists()
    assert not log.exists()

    def fail(error: Exception) -> Path:
        with pytest.raises(type(error)), temporary_log() as log:
            raise error
        return log

    assert not fail(UserError("x")).exists()
    kept = fail(UnexpectedError("x"))
    assert kept.exists()
    kept.unlink()


def test_unexpected_errors_name_the_log(tmp_path: Path, capfd):
    log = tmp_path / "log.txt"

    def fail(error: Exception) -> None:
        with run_console(log), log_traceback(log):
            raise error

    with pytest.raises(UnexpectedError, match=f"ZeroDivisionError: over zero; the traceback is in {log}"):
        fail(ZeroDivisionError("over\nzero"))
    assert "Traceback" in log.read_text()
    with pytest.raises(UserError, match=r"^yours$"):
        fail(UserError("yours"))
    assert "error: yours" in log.read_text()
    assert capfd.readouterr() == ("", "")


def test_a_closed_output_does_not_end_an_evaluation(tmp_path: Path):
    """`./deepy.py evaluate … | head -1` completes; rich would silently exit with code 1."""
    output, (reader, writer) = os.dup(1), os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    os.close(reader)
    try:
        with run_console(tmp_path / "log.txt") as console:
            for number in range(3):
                console.print(f"line {number}")
    finally:
        os.dup2(output, 1)
        os.close(output)
    assert (tmp_path / "log.txt").read_text().splitlines() == ["line 0", "line 1", "line 2"]


def test_a_table_shows_whole_cells_at_any_width() -> None:
    """Cells are complete at every width: gaps of two columns, then of one, then lines beyond the edge."""
    cells = ["1,234,567", "0.0123", "attention"]
    for width, line in ((40, "1,234,567  0.0123  attention"), (27, "1,234,567 0.0123 attention"), (9, None)):
        table, file = Table("a", "b", "c", box=None, pad_edge=False), StringIO()
        table.add_row(*cells)
        print_table(Console(file=file, width=width), table)
        assert file.getvalue().splitlines()[1] == (line or "1,234,567 0.0123 attention")
