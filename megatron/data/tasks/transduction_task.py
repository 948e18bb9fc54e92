"""Tasks that map an input to outputs read all at once, as in Delétang et al. (2023), section 4.

    tokens     x₁ … x_n   c … c   _ … _        n of the input, then compute tokens, then m placeholders
    labels                        y₁ … y_m     an answer at each placeholder; answers are not fed back

Inputs and outputs have separate alphabets, so that symbol 0 of the inputs is not symbol 0 of the outputs. One
vocabulary contains both:

    0 … a − 1            the input's alphabet
    a                    the placeholder
    a + 1                the compute token, if used
    then b ids           the outputs' alphabet

Ids of the outputs are never inputs, and other ids are never labels. With a separate output matrix (`no_weight_tying:
true`), the rows of the outputs' ids are the separate output layer of the papers. The other rows are classes that never
occur. Training drives their softmax probability toward 0, and scoring excludes them.
"""

from typing import ClassVar

import numpy as np

from megatron.data.tasks.task import Array, Task, TaskBatch
from megatron.options.section import config_field

TERMINATOR_SYMBOL = 2
"""Symbol that ends outputs of fewer than `get_output_length(n)` symbols; zeros follow it."""


class TransductionTask(Task):
    """Base class of such tasks. A subclass defines the alphabets and the output length, and samples strings."""

    compute_tokens: int = config_field(
        0, "number of compute tokens per input token, between input and placeholders", ge=0, le=1000
    )

    paper = "Delétang et al. (2023), Neural Networks and the Chomsky Hierarchy"
    note = (
        "The model is a causal decoder, in which an input token attends only to previous tokens. The papers' network "
        "is an encoder with attention to all tokens. Compare the order of methods with the papers, not single numbers."
    )
    num_input_symbols: ClassVar[int]
    """Size of the input alphabet, a."""
    num_output_symbols: ClassVar[int]
    """Size of the output alphabet, b."""
    has_terminator: ClassVar[bool] = False
    """True if accuracy counts only the outputs up to and including the first TERMINATOR_SYMBOL."""

    def get_input_length(self, length: int) -> int:
        """Return the actual number of input tokens for a nominal length."""
        return length

    def get_output_length(self, length: int) -> int:
        return 1

    def sample_strings(self, generator: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
        """Sample inputs [B, n] (n: `get_input_length`) and outputs [B, m], each in its own alphabet."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return self.answer_ids.stop

    @property
    def answer_ids(self) -> range:
        first = self.num_input_symbols + 1 + bool(self.compute_tokens)
        return range(first, first + self.num_output_symbols)

    def get_sequence_length(self, length: int) -> int:
        return self.get_input_length(length) * (1 + self.compute_tokens) + self.get_output_length(length)

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        inputs, outputs = self.sample_strings(generator, count, length)
        num_inputs, num_outputs = inputs.shape[1], outputs.shape[1]
        shape = (count, self.get_sequence_length(length))
        first_answer = shape[1] - num_outputs
        tokens = np.full(shape, self.num_input_symbols, dtype=np.int64)
        tokens[:, :num_inputs] = inputs
        tokens[:, num_inputs:first_answer] = self.num_input_symbols + 1
        labels = np.full(shape, self.answer_ids.start, dtype=np.int64)
        labels[:, first_answer:] = outputs + self.answer_ids.start
        loss_mask = np.zeros(shape, dtype=bool)
        loss_mask[:, first_answer:] = True
        accuracy_mask = loss_mask.copy()
        if self.has_terminator:
            ends = (outputs == TERMINATOR_SYMBOL).argmax(axis=1)
            accuracy_mask[:, first_answer:] = np.arange(num_outputs) <= ends[:, None]
        return TaskBatch(tokens, labels, loss_mask, accuracy_mask)
