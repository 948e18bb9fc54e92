"""What trivial predictors reach on sequences: an accuracy below or at which nothing has been learned.

A predictor is fitted to sequences of its own and scored on those of an evaluation, so that it gains nothing from the
chance that made them.

    constant        the same answer everywhere, the most frequent one
    position        at each position the most frequent answer: it knows position and length, and no token

Others read tokens and still do not solve the task: what they are, the task says (`Task.predict_trivially`).
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
    frequencies = _count_answers(task, fitted)
    constant = frequencies.sum(axis=0).argmax()
    by_position = frequencies.argmax(axis=1)
    labels = scored.labels - task.answer_ids.start
    return {
        CONSTANT: (labels == constant) & scored.accuracy_mask,
        POSITION: (labels == by_position) & scored.accuracy_mask,
        **{
            name: (answers == scored.labels) & scored.accuracy_mask
            for name, answers in task.predict_trivially(scored).items()
        },
    }


def _count_answers(task: Task, batch: TaskBatch) -> Array:
    """How often each answer is right at each position, int64 [T, answers]."""
    length, num_answers = batch.labels.shape[1], len(task.answer_ids)
    _, positions = np.nonzero(batch.accuracy_mask)
    flat = positions * num_answers + batch.labels[batch.accuracy_mask] - task.answer_ids.start
    return np.bincount(flat, minlength=length * num_answers).reshape(length, num_answers)
