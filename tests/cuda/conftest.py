"""Fixtures of the tests on the null CUDA device (`make test-cuda`); tests/conftest.py collects them only there."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.rehearsal.rehearsed_run import write_synthetic_corpus
from tools.gpu.null_device_cases import VOCABULARY

LONGEST = 131072
SECONDS = 1800
"""Time limit of a test, in seconds: a wait for a device that computes nothing would never end."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus folder of random tokens, with sequences of the maximum length."""
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_synthetic_corpus(folder, VOCABULARY, LONGEST)
    return folder


@pytest.fixture(autouse=True)
def _ends_in_time() -> Iterator[None]:
    """Time limit that makes a hanging test fail at the line where it hangs."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError(f"the test took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
