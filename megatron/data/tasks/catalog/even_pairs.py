"""Even pairs: the parity of the number of unequal neighbors."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import Array, TransductionTask


class EvenPairs(TransductionTask):
    """n bits; the answer is the parity of unequal neighbors, which is 1 if the first and the last bit differ."""

    title = "the parity of the number of unequal neighbors among n bits"
    chomsky_level = "R"
    num_input_symbols = 2
    num_output_symbols = 2

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        inputs = sample_bits(generator, count, length)
        return inputs, (inputs[:, :1] + inputs[:, -1:]) % 2
