"""Files of zeros that take no room on the disk, and their checksums without reading them.

The states that a rehearsal saves are void, almost all of them zeros, and those of a large model would fill the disk of
the machine it runs on. Blocks of zeros are therefore left out of files, which have their full size all the same and
read as if they were there (`SaveHooks.open_file`).
"""

import os

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, its bits reversed as zlib has them."""


class SparseFile:
    """A file that is written from its beginning to its end, zeros left out. Args: path, which is replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> "SparseFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, block: bytes | memoryview) -> int:
        """Write a block, or skip it if it is zeros."""
        if len(block) >= 4096 and is_zero(block):
            self._file.seek(len(block), os.SEEK_CUR)
            return len(block)
        return self._file.write(block)

    def skip(self, size: int) -> None:
        """So many zeros."""
        self._file.seek(size, os.SEEK_CUR)

    def flush(self) -> None:
        """Bring the file to its size, zeros at its end included."""
        self._file.flush()
        self._file.truncate()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()


def is_zero(block: bytes | memoryview) -> bool:
    """Are these zeros alone?"""
    view = memoryview(block)
    # Its beginning, and then each byte against the one before: compared by the C library.
    return not any(view[:16]) and view[16:] == view[:-16]


def crc32_with_zeros(checksum: int, size: int) -> int:
    """The CRC-32 of what `checksum` is of and `size` zeros after it.

    A zero shifts the register, which is linear over bits, so `size` of them are a power of one matrix (as zlib's
    crc32_combine has it).
    """
    register = checksum ^ 0xFFFFFFFF
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # what one zero bit makes of each bit of the register
    for _ in range(3):
        matrix = [_apply(matrix, row) for row in matrix]  # of one zero byte
    while size:
        if size & 1:
            register = _apply(matrix, register)
        matrix = [_apply(matrix, row) for row in matrix]
        size >>= 1
    return register ^ 0xFFFFFFFF


def _apply(matrix: list[int], vector: int) -> int:
    """A matrix of bits times a vector of them, modulo 2."""
    result, row = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[row]
        vector >>= 1
        row += 1
    return result
