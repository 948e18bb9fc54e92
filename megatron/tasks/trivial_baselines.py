"""Accuracy of trivial predictors; a model at or below it has learned nothing.

Predictors are fitted to separate sequences and scored on those of an evaluation, so that they do not exploit chance.

    constant        the most frequent answer everywhere
    position        the most frequent answer at each position; it depends on position and length, but not on tokens

Tasks define other predictors, which read tokens but do not solve the task (`Task.predict_trivially`).
"""

import numpy as np

from megatron.tasks.task import Array, Task, TaskBatch

CONSTANT, POSITION = "the same answer everywhere", "the likeliest answer at each place"


def measure_baseline_correctness(task: Task, fitted: TaskBatch, scored: TaskBatch) -> dict[str, Array]:
    """Return where trivial predictors are correct, by description.

    Args:
        fitted: sequences of a length to fit the predictors to.
        scored: other sequences of the same length, [B, T].

    Returns:
        bool [B, T] each, False at positions that do not count.
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
    """Count how often each answer is correct at each position, int64 [T, answers]."""
    length, num_answers = batch.labels.shape[1], len(task.answer_ids)
    _, positions = np.nonzero(batch.accuracy_mask)
    flat = positions * num_answers + batch.labels[batch.accuracy_mask] - task.answer_ids.start
    return np.bincount(flat, minlength=length * num_answers).reshape(length, num_answers)
