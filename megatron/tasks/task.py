"""What a task is: sequences that are drawn, with the places at which something is asked.

A task's options are the fields of its class, so they have types, bounds, defaults and a sentence each. Whatever trains
on a task or scores it knows `draw` and the facts beside it, and no task by its name.

B sequences, n the length of the input, T = `places(n)` tokens of the whole sequence.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from megatron.options.section import ConfigSection

Array = np.ndarray


class TaskBatch(NamedTuple):
    """B sequences of one length. Place t reads the token t and is asked for the label t: nothing is shifted."""

    tokens: Array
    """int64 [B, T]."""
    labels: Array
    """int64 [B, T], one of the task's answers; without meaning where nothing is asked."""
    loss_mask: Array
    """bool [B, T], the places that have a loss."""
    accuracy_mask: Array
    """bool [B, T], those of them that count for accuracy."""


class Task(ConfigSection):
    """Base of all tasks. A subclass says what its class variables are, and overrides the methods."""

    title: ClassVar[str]
    """What is asked, in a sentence without a full stop."""
    source: ClassVar[str]
    level: ClassVar[str | None] = None
    """Of the Chomsky hierarchy, for the tasks that are chosen by it: R, D or C."""
    order_free: ClassVar[bool] = False
    """Is the answer the same whatever the order of the input? (D's Table 6 marks such tasks with a dagger.)"""
    note: ClassVar[str] = ""
    """What has to be known when results are compared with the source's, in sentences."""
    whole: ClassVar[bool] = False
    """Is the share of sequences of which every token is right reported too?"""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary: ids are in [0, size)."""
        raise NotImplementedError

    @property
    def num_answers(self) -> range:
        """The ids that labels may have: of these an answer is chosen, and over these the loss is taken in scoring."""
        raise NotImplementedError

    def unsupported_length_reason(self, length: int) -> str | None:
        """Why there is no input of a length, else None: a clause that follows it."""
        return None if length >= 1 else "inputs have at least 1 token"

    def sequence_length(self, length: int) -> int:
        """Tokens of a sequence whose input has this length."""
        raise NotImplementedError

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        """Draw `count` sequences whose input has a length that is not refused."""
        raise NotImplementedError

    def baseline_accuracies(self, length: int) -> dict[str, float]:
        """What else can be had without solving the task, at a length: a predictor in words, and its accuracy."""
        return {}
