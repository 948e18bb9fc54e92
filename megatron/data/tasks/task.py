"""Task interface: a generator of sequences, with the positions where answers are expected.

The options of a task are the fields of its class, with types, bounds, defaults, and descriptions. Training and
evaluation use `sample_batch` and the attributes of a task, and never depend on its name.

B sequences, n the length of the input, T = `get_sequence_length(n)` tokens of the whole sequence.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from megatron.options.section import ConfigSection

Array = np.ndarray


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

    def predict_trivially(self, batch: TaskBatch) -> dict[str, Array]:
        """Return the answers [B, T] of predictors that read the tokens but do not solve the task, by description.

        Answers are undefined outside the accuracy mask.
        """
        return {}

    def get_baseline_accuracies(self, length: int) -> dict[str, float]:
        """Return accuracies that are possible without solving the task at a length, by predictor description."""
        return {}
