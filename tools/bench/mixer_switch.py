"""Turns the mixer's CUDA kernels on or off for a benchmark's candidate (`kernels/cdape_attention/mixer.py`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kernels.cdape_attention.mixer import VARIABLE


@contextmanager
def use_mixer(is_on: bool) -> Iterator[None]:
    """Forward passes inside take the CUDA kernels where these compute their shapes, or Triton's kernels everywhere."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if is_on else "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
