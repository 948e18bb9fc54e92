"""Square root: the integer part of a square root, bit by bit."""

import math

import numpy as np

from megatron.data.tasks.sampling import sample_positive
from megatron.data.tasks.task import Array, TransductionTask


class ComputeSqrt(TransductionTask):
    """n bits of a number uniform on 1 … 2^n − 1, most significant first; the answer is ⌊√x⌋ in exactly ⌈n/2⌉ bits."""

    title = "the integer part of a square root in binary, most significant bit first"
    chomsky_level = "C"
    num_input_symbols = 2
    num_output_symbols = 2

    def get_output_length(self, length: int) -> int:
        return (length + 1) // 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = sample_positive(generator, count, np.full(count, length), length)
        packed = np.packbits(inputs.astype(np.uint8), axis=1)
        unused_bits = 8 * packed.shape[1] - length  # zeros at the end of the last byte
        width = self.get_output_length(length)
        roots = [math.isqrt(int.from_bytes(row.tobytes()) >> unused_bits) for row in packed]
        root_bytes = np.frombuffer(b"".join(root.to_bytes(-(-width // 8)) for root in roots), dtype=np.uint8)
        unpacked = np.unpackbits(root_bytes.reshape(count, -1), axis=1)
        return inputs, unpacked[:, unpacked.shape[1] - width :].astype(np.int64)
