"""Kernels run in Triton's interpreter where there is no GPU.

Triton chooses once, when it is imported and when a kernel is decorated. TRITON_INTERPRET is in the environment only
while triton is imported and while this folder is collected and run; other folders and their processes never see it.
"""

import sys
from collections.abc import Generator, Iterator

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    if "triton.language" not in sys.modules:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            import triton.language
    import triton

    if isinstance(triton.language.cdiv, triton.JITFunction):
        raise RuntimeError("triton was imported without TRITON_INTERPRET before tests/kernels: see its conftest.py")
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv("TRITON_INTERPRET", "1")
        return (yield)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> str:
    """Where kernels run: a GPU if there is one."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, so an element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
