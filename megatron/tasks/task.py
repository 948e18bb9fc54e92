"""What a task is: a generator of sequences, with the positions at which answers are expected.

A task's options are the fields of its class, so they have types, bounds, defaults and a sentence each. Whatever trains
on a task or scores it knows `sample_batch` and the facts beside it, and no task by its name.

B sequences, n the length of the input, T = `sequence_length(n)` tokens of the whole sequence.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from megatron.options.section import ConfigSection

Array = np.ndarray


class TaskBatch(NamedTuple):
    """B sequences of one length. Label t is the answer that is expected after token t was read: nothing is shifted."""

    tokens: Array
    """int64 [B, T]."""
    labels: Array
    """int64 [B, T], one of the task's `answer_ids`; without meaning outside `loss_mask`."""
    loss_mask: Array
    """bool [B, T], the positions that have a loss."""
    accuracy_mask: Array
    """bool [B, T], those of them that count for accuracy."""
    position_ids: Array | None = None
    """int64 [B, T], what encodings are told of each token, in any order; None for the indices 0, 1, …"""


class Task(ConfigSection):
    """Base of all tasks. A subclass says what its class variables are, and overrides the methods."""

    title: ClassVar[str]
    """What is asked, in a sentence without a full stop."""
    paper: ClassVar[str]
    """Authors, year and title of the publication that the task comes from."""
    chomsky_level: ClassVar[str | None] = None
    """Of the Chomsky hierarchy, for the tasks that are chosen by it: R, D or C."""
    permutation_invariant: ClassVar[bool] = False
    """Is the answer the same whatever the order of the input? (DAPE V2's Table 6 marks such tasks with a dagger.)"""
    note: ClassVar[str] = ""
    """What has to be known when results are compared with the paper's, in sentences."""
    scores_exact_match: ClassVar[bool] = False
    """Is the share of sequences of which every token is right reported too?"""
    has_depth: ClassVar[bool] = False
    """Can it be chosen at which depth of the input the answer stands? Then there is `sample_batch_at_depth`, and
    `evaluate --depths` maps accuracy over depth and length."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary: ids are in [0, size)."""
        raise NotImplementedError

    @property
    def answer_ids(self) -> range:
        """The ids that labels may have: of these an answer is chosen, and over these the loss is taken in scoring."""
        raise NotImplementedError

    @property
    def position_limit(self) -> int | None:
        """All positions that its batches say are smaller; None for a task whose tokens stand at their indices."""
        return None

    def unsupported_length_reason(self, length: int) -> str | None:
        """Why there is no input of a length, else None: a clause that follows it."""
        return None if length >= 1 else "inputs have at least 1 token"

    def sequence_length(self, length: int) -> int:
        """Tokens of a sequence whose input has this length."""
        raise NotImplementedError

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        """Draw `count` sequences whose input has a supported length."""
        raise NotImplementedError

    def sample_batch_at_depth(self, generator: np.random.Generator, count: int, length: int, depth: float) -> TaskBatch:
        """The same, of sequences whose answer stands at one depth: the share, 0 to 1, of what could stand before it in
        the input that does. Of several answers it is the first that is asked for. For tasks that `has_depth`."""
        raise NotImplementedError

    def length_weight(self, length: int) -> float:
        """How often training draws a supported length, in proportion to the others."""
        return 1.0

    def predict_trivially(self, batch: TaskBatch) -> dict[str, Array]:
        """Answers [B, T] of predictors that read the tokens and do not solve the task, by what they are called; without
        meaning outside the accuracy mask."""
        return {}

    def baseline_accuracies(self, length: int) -> dict[str, float]:
        """Accuracies that are reached without solving the task, at a length, by the predictor in words."""
        return {}
