"""Base classes of tasks: generators of sequences, with the positions where answers are expected.

`Task` is the interface. The answers of an `AutoregressiveTask` are predicted letter by letter, given the correct
letters before. Those of a `TransductionTask` are read all at once, at placeholders.

The options of a task are the fields of its class, with types, bounds, defaults, and descriptions. Training and
evaluation use `sample_batch` and the attributes of a task, and never depend on its name.

B sequences, n the length of the input, T = `get_sequence_length(n)` tokens of the whole sequence.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from megatron.options.section import ConfigSection, config_field

Array = np.ndarray
TERMINATOR_SYMBOL = 2
"""Symbol that ends outputs of fewer than `get_output_length(n)` symbols; zeros follow it."""


class TaskBatch(NamedTuple):
    """Batch of B sequences of one length. Label t is the answer expected after token t: nothing is shifted."""

    tokens: Array
    """Input tokens, int64 [B, T]."""
    labels: Array
    """Expected answers, int64 [B, T], from the task's `answer_ids`; undefined outside `loss_mask`."""
    loss_mask: Array
    """True at positions with a loss, bool [B, T]."""
    accuracy_mask: Array
    """True at positions that count for accuracy, a subset of `loss_mask`, bool [B, T]."""
    position_ids: Array | None = None
    """Position ids for encodings, int64 [B, T], in any order; None for the indices 0, 1, …"""


class Task(ConfigSection):
    """Base class of all tasks. A subclass sets the class variables, and overrides the methods."""

    title: ClassVar[str]
    """Description of the task, without a final period."""
    paper: ClassVar[str]
    """Publication of the task: authors, year, and title."""
    chomsky_level: ClassVar[str | None] = None
    """Level in the Chomsky hierarchy for tasks selected by it: R, D, or C."""
    permutation_invariant: ClassVar[bool] = False
    """True if the answer does not depend on the order of the input (marked with a dagger in DAPE V2's Table 6)."""
    note: ClassVar[str] = ""
    """Caveats for comparisons with the paper's results, in full sentences."""
    scores_exact_match: ClassVar[bool] = False
    """True if the share of completely correct sequences is reported too."""
    has_depth: ClassVar[bool] = False
    """True if the depth of the answer in the input can be chosen.

    The task then implements `sample_batch_at_depth`, and `evaluate --depths` maps accuracy over depth and length.
    """

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; ids are in [0, size)."""
        raise NotImplementedError

    @property
    def answer_ids(self) -> range:
        """Ids of valid labels. Predictions and the loss in evaluation are restricted to them."""
        raise NotImplementedError

    @property
    def position_limit(self) -> int | None:
        """Exclusive upper limit of the task's position ids, or None if it uses token indices."""
        return None

    def describe_unsupported_length(self, length: int) -> str | None:
        """Return the reason why there are no inputs of a length, or None. The reason is a clause for error messages."""
        return None if length >= 1 else "inputs have at least 1 token"

    def get_sequence_length(self, length: int) -> int:
        """Return the number of tokens in a sequence with this input length."""
        raise NotImplementedError

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        """Sample `count` sequences with a supported input length."""
        raise NotImplementedError

    def sample_batch_at_depth(self, generator: np.random.Generator, count: int, length: int, depth: float) -> TaskBatch:
        """Sample sequences whose answer is at a depth of the input. Only for tasks with `has_depth`.

        The depth is the share, from 0 to 1, of the other input tokens that precede the answer. If there are several
        answers, it applies to the first one.
        """
        raise NotImplementedError

    def get_length_weight(self, length: int) -> float:
        """Return the relative frequency of a supported length in training."""
        return 1.0

    def compute_baseline_predictions(self, batch: TaskBatch) -> dict[str, Array]:
        """Return the answers [B, T] of predictors that read the tokens but do not solve the task, by description.

        Answers are undefined outside the accuracy mask.
        """
        return {}

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        """Return accuracies that are possible without solving the task at a length, by predictor description."""
        return {}


class AutoregressiveTask(Task):
    """Base class of tasks with a question, and an answer that ends with a stop token.

    The model receives the correct answer so far (teacher forcing). All letters are correct if and only if greedy
    decoding generates the whole answer.
    """

    scores_exact_match = True

    @property
    def num_letters(self) -> int:
        """Number of letters, whose ids are 0, 1, …; the vocabulary has three more tokens."""
        raise NotImplementedError

    @property
    def begin_token(self) -> int:
        """Token at the start of a sequence."""
        return self.num_letters

    @property
    def separator_token(self) -> int:
        """Token between the string and what follows it."""
        return self.num_letters + 1

    @property
    def stop_token(self) -> int:
        """Token at the end of an answer."""
        return self.num_letters + 2

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 3

    @property
    def answer_ids(self) -> range:
        return range(self.vocab_size)

    def build_batch(self, question: Array, answer: Array) -> TaskBatch:
        """Build sequences from questions [B, q] and the letters of answers [B, r].

        Each letter is the label of the token before it, and the stop token is the label of the last letter.
        """
        first, count = question.shape[1] - 1, len(question)
        tokens = np.concatenate([question, answer], axis=1)
        labels = np.full(tokens.shape, self.stop_token)
        labels[:, first:-1] = answer
        mask = np.zeros((count, tokens.shape[1]), dtype=bool)
        mask[:, first:] = True
        return TaskBatch(tokens, labels, mask, mask)


class StringTask(AutoregressiveTask):
    """Base class of tasks whose question is a string of letters."""

    paper = "Jelassi et al. (2024), Repeat After Me"

    letters: int = config_field(26, "size of the alphabet", ge=2, le=10**6)

    @property
    def num_letters(self) -> int:
        return self.letters

    def build_string_batch(self, string: Array, answer: Array) -> TaskBatch:
        """Build sequences `$ string | answer .` from the letters of both, [B, n] and [B, r]."""
        begin, separator = (np.full((len(string), 1), token) for token in (self.begin_token, self.separator_token))
        return self.build_batch(np.concatenate([begin, string, separator], axis=1), answer)


class TransductionTask(Task):
    """Base class of tasks that map an input to outputs read all at once, as in Delétang et al. (2023), section 4.

        tokens     x₁ … x_n   c … c   _ … _        n of the input, then compute tokens, then m placeholders
        labels                        y₁ … y_m     an answer at each placeholder; answers are not fed back

    Inputs and outputs have separate alphabets, so that symbol 0 of the inputs is not symbol 0 of the outputs. One
    vocabulary contains both:

        0 … a − 1            the input's alphabet
        a                    the placeholder
        a + 1                the compute token, if used
        then b ids           the outputs' alphabet

    Ids of the outputs are never inputs, and other ids are never labels. With a separate output matrix
    (`no_weight_tying: true`), the rows of the outputs' ids are the separate output layer of the papers. The other rows
    are classes that never occur. Training drives their softmax probability toward 0, and scoring excludes them.

    A subclass defines the alphabets and the output length, and samples strings.
    """

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
