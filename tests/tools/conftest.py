"""Tools run as a user runs them: a process of their own, started in the repository."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
def refuses(run_tool: Callable[..., Finished]) -> Callable[..., None]:
    """Check that a tool takes no such words: exit code 2 and one line that says a text."""

    def check(*words: str, says: str) -> None:
        done = run_tool(*words)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr

    return check
