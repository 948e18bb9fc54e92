"""Compute sqrt: the integer part of a square root, bit by bit."""

import math

import numpy as np

from megatron.tasks.task import Array
from megatron.tasks.transduction import Transduction, sample_positive


class ComputeSqrt(Transduction):
    """n bits of a number that is uniform on 1 … 2^n − 1, most significant first; ⌊√x⌋ in exactly ⌈n/2⌉ bits."""

    title = "the integer part of a square root in binary, most significant bit first"
    level = "C"
    inputs = 2
    outputs = 2

    def output_length(self, length: int) -> int:
        return (length + 1) // 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        given = sample_positive(generator, count, np.full(count, length), length)
        packed = np.packbits(given.astype(np.uint8), axis=1)
        beyond = 8 * packed.shape[1] - length  # zeros that fill the last byte
        width = self.output_length(length)
        roots = [math.isqrt(int.from_bytes(row.tobytes()) >> beyond) for row in packed]
        whole = np.frombuffer(b"".join(root.to_bytes(-(-width // 8)) for root in roots), dtype=np.uint8)
        unpacked = np.unpackbits(whole.reshape(count, -1), axis=1)
        return given, unpacked[:, unpacked.shape[1] - width :].astype(np.int64)
