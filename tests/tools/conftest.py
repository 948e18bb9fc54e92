"""Tools run in a separate process if necessary, and otherwise in this process, which is faster."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import fake_gpu
import pytest

ROOT = Path(__file__).resolve().parents[2]
Finished = subprocess.CompletedProcess[str]


@pytest.fixture
def run_tool() -> Callable[..., Finished]:
    """Function that runs Python with arguments for at most a minute."""

    def run(*words: str) -> Finished:
        return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    """Function that runs a tool's main() with arguments in this process and returns the exit code, or None."""

    def run(tool: ModuleType, *words: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", [str(tool.__file__), *words])
        try:
            tool.main()
        except SystemExit as left:
            return left.code
        return None

    return run


@pytest.fixture
def refuses(command: Callable[..., int | str | None], capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Function that checks that a tool rejects arguments: exit code 2 and one line with the given text."""

    def check(tool: ModuleType, *words: str, says: str) -> None:
        assert command(tool, *words) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert output.err.count("\n") == 1
        assert says in output.err

    return check


@pytest.fixture
def gpu() -> Iterator[None]:
    """Fake GPU backed by the CPU."""
    with fake_gpu.fake_gpu():
        yield
