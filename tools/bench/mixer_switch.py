"""Switch for the mixer's CUDA kernels in benchmarks (`megatron/kernels/cdape_attention/mixer.py`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.kernels.cdape_attention.mixer import VARIABLE


@contextmanager
def use_mixer(is_on: bool) -> Iterator[None]:
    """Use the CUDA kernels in the forward pass if they support the shapes (`is_on`), or Triton's kernels only."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if is_on else "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
