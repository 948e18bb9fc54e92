"""Stack manipulation: the contents of a stack after some actions."""

import numpy as np

from megatron.data.tasks.sampling import sample_bits
from megatron.data.tasks.task import TERMINATOR_SYMBOL, Array, TransductionTask

POP, PUSH = 2, 3


class StackManipulation(TransductionTask):
    """Stack of k bits from the bottom, k uniform on 1 … n − 1, then n − k actions: 2 pops, 3 pushes 0, 4 pushes 1.

    The outputs are the final stack from the top, the terminator, and zeros. Popping an empty stack has no effect. For n
    = 1 the input is one bit without actions.
    """

    title = "the contents of a stack of k bits, from the top, after n − k actions"
    chomsky_level = "D"
    num_input_symbols = 5
    num_output_symbols = 3
    has_terminator = True

    def get_output_length(self, length: int) -> int:
        return length + 1

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        sizes = generator.integers(1, length, size=count) if length > 1 else np.ones(count, dtype=np.int64)
        actions = generator.integers(POP, PUSH + 2, size=(count, length))
        inputs = np.where(np.arange(length) < sizes[:, None], sample_bits(generator, count, length), actions)
        rows, heights = np.arange(count), np.zeros(count, dtype=np.int64)
        stack = np.zeros((count, length + 1), dtype=np.int64)
        for symbol in inputs.T:
            pops = symbol == POP
            stack[rows, heights] = np.where(pops, stack[rows, heights], symbol % PUSH)
            heights = np.maximum(heights + np.where(pops, -1, 1), 0)
        indices = heights[:, None] - 1 - np.arange(length + 1)
        outputs = np.where(indices >= 0, np.take_along_axis(stack, np.maximum(indices, 0), axis=1), 0)
        outputs[rows, heights] = TERMINATOR_SYMBOL
        return inputs, outputs
