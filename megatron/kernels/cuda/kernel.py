"""Description of a CUDA C++ kernel, used to compile, launch and emulate it."""

from pathlib import Path
from typing import NamedTuple


class CudaKernel(NamedTuple):
    """Kernel in the language of `warp.h`: a struct in a header, and the struct of its arguments."""

    folder: Path
    header: str
    name: str
    """Name of the struct with its template arguments, for example "MixerBackward<1, true, false>"."""
    arguments: str
    num_threads: int
    shared_bytes: int
    """Dynamic shared memory of a block, in bytes; equal to `MEMORY_BYTES` in the header, which a test checks."""
