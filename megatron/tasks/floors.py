"""What trivial predictors reach on sequences: an accuracy below or at which nothing has been learned.

A predictor is fitted to sequences of its own and scored on those of an evaluation, so that it gains nothing from the
chance that made them.

    constant        the same answer everywhere, the most frequent one
    place           at each place the answer that is most frequent there: it knows place and length, and no token
"""

import numpy as np

from megatron.tasks.task import Array, Drawn, Task

CONSTANT, PLACE = "the same answer everywhere", "the likeliest answer at each place"


def right(task: Task, fitted: Drawn, scored: Drawn) -> dict[str, Array]:
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
    labels = scored.labels - task.answers.start
    return {CONSTANT: (labels == constant) & scored.counted, PLACE: (labels == by_place) & scored.counted}


def _frequencies(task: Task, drawn: Drawn) -> Array:
    """How often each answer is right at each place, int64 [T, answers]."""
    places, kinds = drawn.labels.shape[1], len(task.answers)
    _, at = np.nonzero(drawn.counted)
    flat = at * kinds + drawn.labels[drawn.counted] - task.answers.start
    return np.bincount(flat, minlength=places * kinds).reshape(places, kinds)
