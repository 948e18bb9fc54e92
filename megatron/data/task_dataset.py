"""Samples of a task: drawn when they are read, and never stored.

All sequences of an optimizer step have one length, each of the task's as often unless the task weighs them; both follow
from the seed, the split and the global index of the step's first sample. So a run that is stopped and resumed goes on
with the samples that it would have had, and ranks draw the same however they divide a batch.

A step's whole batch is drawn at a time, by whoever needs one sample of it: drawing many at once takes hardly longer.
"""

import numpy as np
import torch

from megatron.options.data import SPLITS, Split
from megatron.tasks.task import TaskBatch
from megatron.tasks.task_config import TaskConfig


class TaskDataset(torch.utils.data.Dataset):
    """Samples as dictionaries of `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T]; of a task that says
    what encodings are told of each token, `position_ids` too, int64 [T].

    Labels are not one token ahead: each is the answer at its own position.

    Args:
        task_config: the task and its lengths.
        split: another one draws other sequences.
        total: number of samples.
        seed: of the run.
        batch_size: sequences of an optimizer step.
        start: the first global sample of some step: steps begin there and at every `batch_size` from there.
    """

    def __init__(
        self, task_config: TaskConfig, split: Split, total: int, *, seed: int, batch_size: int, start: int = 0
    ) -> None:
        self.task_config, self.split, self.total = task_config, split, total
        self.seed, self.batch_size, self.start = seed, batch_size, start
        self._step: tuple[int, TaskBatch] | None = None
        """The first sample of the step that was drawn last, and its batch."""

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.total:
            raise IndexError(f"sample {index} of {self.total}")
        first = index - (index - self.start) % self.batch_size
        if self._step is None or self._step[0] != first:
            self._step = first, self._draw_step(first)
        batch, row = self._step[1], index - first
        sample = {
            "tokens": torch.from_numpy(batch.tokens[row]),
            "labels": torch.from_numpy(batch.labels[row]),
            "loss_mask": torch.from_numpy(batch.loss_mask[row].astype(np.float32)),
        }
        if batch.position_ids is not None:
            sample["position_ids"] = torch.from_numpy(batch.position_ids[row])
        return sample

    def _draw_step(self, first: int) -> TaskBatch:
        """The sequences of the step whose first sample this is, or would be."""
        # Not negative, also before a changed batch.
        entropy = [self.seed, SPLITS.index(self.split), first + self.batch_size]
        generator = np.random.Generator(np.random.PCG64(entropy))
        lengths, weights = self.task_config.lengths, self.task_config.length_weights
        length = lengths[generator.choice(len(lengths), p=weights) if weights else generator.integers(len(lengths))]
        return self.task_config.task.sample_batch(generator, self.batch_size, length)
