"""Shared by all tests: small shapes, quiet and deterministic torch, one thread (tests run side by side)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # tests/kernels run in Triton's interpreter, which triton chooses when any test first imports it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

settings.register_profile("farfield", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("farfield")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
