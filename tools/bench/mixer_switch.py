"""Turns the mixer's CUDA kernels on for a benchmark's candidate (`kernels/cdape_attention/mixer.py`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kernels.cdape_attention.mixer import VARIABLE


@contextmanager
def use_mixer() -> Iterator[None]:
    """Forward passes inside take the kernels in their backward pass, where the kernels compute their shapes."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
