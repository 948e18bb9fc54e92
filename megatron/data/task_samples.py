"""Samples of a task: drawn when they are asked for, and never stored.

All sequences of an optimizer step have one length, which is uniform on the task's lengths; both follow from the seed,
the split and the global index of the step's first sample. So a run that is stopped and resumed goes on with the samples
that it would have had, and ranks draw the same however they divide a batch.

A step's whole batch is drawn at a time, by whoever needs one sample of it: drawing many at once takes hardly longer.
"""

import numpy as np
import torch

from megatron.options.data import SPLITS, Split
from megatron.tasks.task import TaskBatch
from megatron.tasks.task_config import TaskConfig


class TaskDataset(torch.utils.data.Dataset):
    """Samples as dictionaries of `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T], 1 at what is asked.

    Labels are not one token ahead: each is what is asked where it stands.

    Args:
        task_config: the task and its lengths.
        split: another one draws other sequences.
        total: number of samples.
        seed: of the run.
        batch: sequences of an optimizer step.
        start: the first global sample of some step: steps begin there and at every `batch` from there.
    """

    def __init__(
        self, task_config: TaskConfig, split: Split, total: int, *, seed: int, batch: int, start: int = 0
    ) -> None:
        self.task_config, self.split, self.total = task_config, split, total
        self.seed, self.batch, self.start = seed, batch, start
        self._drawn: tuple[int, TaskBatch] | None = None

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.total:
            raise IndexError(f"sample {index} of {self.total}")
        first = index - (index - self.start) % self.batch
        if self._drawn is None or self._drawn[0] != first:
            self._drawn = first, self._draw_step(first)
        drawn, row = self._drawn[1], index - first
        return {
            "tokens": torch.from_numpy(drawn.tokens[row]),
            "labels": torch.from_numpy(drawn.labels[row]),
            "loss_mask": torch.from_numpy(drawn.loss_mask[row].astype(np.float32)),
        }

    def _draw_step(self, first: int) -> TaskBatch:
        """The sequences of the step whose first sample this is, or would be."""
        origin = [self.seed, SPLITS.index(self.split), first + self.batch]  # not negative, also before a changed batch
        generator = np.random.Generator(np.random.PCG64(origin))
        length = self.task_config.lengths[generator.integers(len(self.task_config.lengths))]
        return self.task_config.task.sample_batch(generator, self.batch, length)
