"""Description of a kernel in CUDA C++, for those who compile, launch or emulate it."""

from pathlib import Path
from typing import NamedTuple


class CudaKernel(NamedTuple):
    """A kernel in the language of `warp.h`: a struct of a header, and the struct of its arguments."""

    folder: Path
    header: str
    name: str
    """Name of the struct with its template arguments, for example "MixerBackward<1, true, false>"."""
    arguments: str
    num_threads: int
    shared_bytes: int
    """Dynamic shared memory of a block; the header says the same (`MEMORY_BYTES`), which a test compares."""
