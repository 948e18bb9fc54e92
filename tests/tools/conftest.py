"""Tools run as a user runs them: in a process of their own where that matters, else in this one, which is faster."""

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
    """Run Python on words, a minute at most."""

    def run(*words: str) -> Finished:
        return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    """Run a tool's main() on words in this process; its exit code, None where it just returns."""

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
    """Check that a tool takes no such words: exit code 2 and one line that says a text."""

    def check(tool: ModuleType, *words: str, says: str) -> None:
        assert command(tool, *words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1
        assert says in said.err

    return check


@pytest.fixture
def gpu() -> Iterator[None]:
    """A GPU that is a CPU."""
    with fake_gpu.fake_gpu():
        yield
