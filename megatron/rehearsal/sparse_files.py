"""Sparse files of zeros, and their checksums computed without reading them.

The states that a rehearsal saves are almost all zeros. Those of a large model would fill the disk of the machine.
Blocks of zeros are therefore left as holes: the file has its full size and reads as usual (`SaveHooks.open_file`).
"""

import os

_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32 with reversed bits, as in zlib."""


class SparseFile:
    """File written sequentially that skips blocks of zeros.

    Args:
        path: file to replace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> "SparseFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, block: bytes | memoryview) -> int:
        """Write a block, or skip it if it is all zeros."""
        if len(block) >= 4096 and is_zero(block):
            self._file.seek(len(block), os.SEEK_CUR)
            return len(block)
        return self._file.write(block)

    def skip(self, size: int) -> None:
        """Skip `size` zero bytes."""
        self._file.seek(size, os.SEEK_CUR)

    def flush(self) -> None:
        """Extend the file to its full size, including trailing zeros."""
        self._file.flush()
        self._file.truncate()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()


def is_zero(block: bytes | memoryview) -> bool:
    """Return True if a block contains only zeros."""
    view = memoryview(block)
    # Compares the first bytes with zero, then each byte with an earlier one, in the C library.
    return not any(view[:16]) and view[16:] == view[:-16]


def crc32_with_zeros(checksum: int, size: int) -> int:
    """Return the CRC-32 of data with this checksum followed by `size` zeros.

    A zero byte shifts the register, which is linear over bits, so `size` zeros are a power of one matrix (as in zlib's
    crc32_combine).
    """
    register = checksum ^ 0xFFFFFFFF
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # effect of one zero bit on each bit of the register
    for _ in range(3):
        matrix = [_apply(matrix, row) for row in matrix]  # effect of one zero byte
    while size:
        if size & 1:
            register = _apply(matrix, register)
        matrix = [_apply(matrix, row) for row in matrix]
        size >>= 1
    return register ^ 0xFFFFFFFF


def _apply(matrix: list[int], vector: int) -> int:
    """Multiply a matrix of bits by a vector of bits, modulo 2."""
    result, row = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[row]
        vector >>= 1
        row += 1
    return result
