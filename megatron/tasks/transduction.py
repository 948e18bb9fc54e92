"""Tasks that map an input to outputs which are read all at once, as in Delétang et al. (2023), section 4.

    places     x₁ … x_n   c … c   _ … _        n of the input, then compute tokens, then m placeholders
    labels                        y₁ … y_m     an answer at each placeholder; nothing that was answered is fed back

The inputs and the outputs have alphabets of their own, so that the symbol 0 of the one is not the symbol 0 of the
other. One vocabulary holds both:

    0 … a − 1            the input's alphabet
    a                    the placeholder
    a + 1                the compute token, if there are any
    then b ids           the outputs' alphabet

No id of the outputs is ever read, and none of the others is ever right. With an output matrix of its own
(`no_weight_tying: true`), the rows of the outputs' ids are the separate output layer of the papers. The other rows are
classes that are never right; training drives their share of the softmax towards 0, and scoring leaves them out.
"""

from typing import ClassVar

import numpy as np

from megatron.options.section import config_field
from megatron.tasks.task import Array, Task, TaskBatch

TERMINATOR_SYMBOL = 2
"""The symbol that ends the outputs which are shorter than the place there is for them; zeros follow it."""


class Transduction(Task):
    """Base of the tasks of this form. A subclass says its alphabets, how long its outputs are, and draws both."""

    compute_tokens: int = config_field(
        0, "compute tokens between input and placeholders, for each token of the input", ge=0, le=1000
    )

    source = "Delétang et al. (2023), Neural Networks and the Chomsky Hierarchy"
    note = (
        "The model is a causal decoder, in which a token of the input sees only those before it; the papers' network "
        "is an encoder, in which each sees all. Compare the order of methods with theirs, never single numbers."
    )
    inputs: ClassVar[int]
    """Symbols of the input's alphabet, a."""
    outputs: ClassVar[int]
    """Symbols of the outputs' alphabet, b."""
    terminated: ClassVar[bool] = False
    """Do only the outputs up to and including the first TERMINATOR count for accuracy?"""

    def input_length(self, length: int) -> int:
        """Tokens that an input of this nominal length really has."""
        return length

    def output_length(self, length: int) -> int:
        """Outputs, m."""
        return 1

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        """Inputs [B, input_length] and outputs [B, m], each in its own alphabet."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return self.num_answers.stop

    @property
    def num_answers(self) -> range:
        first = self.inputs + 1 + bool(self.compute_tokens)
        return range(first, first + self.outputs)

    def sequence_length(self, length: int) -> int:
        return self.input_length(length) * (1 + self.compute_tokens) + self.output_length(length)

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        given, wanted = self.sample_strings(generator, count, length)
        read, asked = given.shape[1], wanted.shape[1]
        shape = (count, self.sequence_length(length))
        tokens = np.full(shape, self.inputs, dtype=np.int64)
        tokens[:, :read] = given
        tokens[:, read : shape[1] - asked] = self.inputs + 1
        labels = np.full(shape, self.num_answers.start, dtype=np.int64)
        labels[:, shape[1] - asked :] = wanted + self.num_answers.start
        places = np.zeros(shape, dtype=bool)
        places[:, shape[1] - asked :] = True
        counted = places.copy()
        if self.terminated:
            ends = (wanted == TERMINATOR_SYMBOL).argmax(axis=1)
            counted[:, shape[1] - asked :] = np.arange(asked) <= ends[:, None]
        return TaskBatch(tokens, labels, places, counted)


def sample_bits(generator: np.random.Generator, count: int, length: int) -> Array:
    """Uniform bits, int64 [count, length]."""
    return generator.integers(2, size=(count, length))


def sample_positive(generator: np.random.Generator, count: int, lengths: Array, width: int) -> Array:
    """Numbers uniform on 1 … 2^length − 1 as bits in any order, int64 [count, width], zeros beyond each length."""
    within = np.arange(width) < lengths[:, None]
    drawn = sample_bits(generator, count, width) * within
    while (zero := ~drawn.any(axis=1)).any():
        drawn[zero] = sample_bits(generator, int(zero.sum()), width) * within[zero]
    return drawn
