"""What trivial predictors reach on sequences: an accuracy below or at which nothing has been learned.

A predictor is fitted to sequences of its own and scored on those of an evaluation, so that it gains nothing from the
chance that made them.

    constant        the same answer everywhere, the most frequent one
    place           at each place the answer that is most frequent there: it knows place and length, and no token
"""

import numpy as np

from megatron.tasks.task import Array, Task, TaskBatch

CONSTANT, POSITION = "the same answer everywhere", "the likeliest answer at each place"


def measure_baseline_correctness(task: Task, fitted: TaskBatch, scored: TaskBatch) -> dict[str, Array]:
    """Where trivial predictors are right, by what they are called.

    Args:
        fitted: sequences of a length, from which the answers are taken.
        scored: others of the same length, [B, T].

    Returns:
        bool [B, T] each, False where nothing counts.
    """
    frequencies = _frequencies(task, fitted)
    constant = frequencies.sum(axis=0).argmax()
    by_place = frequencies.argmax(axis=1)
    labels = scored.labels - task.num_answers.start
    return {
        CONSTANT: (labels == constant) & scored.accuracy_mask,
        POSITION: (labels == by_place) & scored.accuracy_mask,
    }


def _frequencies(task: Task, drawn: TaskBatch) -> Array:
    """How often each answer is right at each place, int64 [T, answers]."""
    places, kinds = drawn.labels.shape[1], len(task.num_answers)
    _, at = np.nonzero(drawn.accuracy_mask)
    flat = at * kinds + drawn.labels[drawn.accuracy_mask] - task.num_answers.start
    return np.bincount(flat, minlength=places * kinds).reshape(places, kinds)
