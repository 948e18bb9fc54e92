"""Task samples, generated when read. The rest of a run's datasets needs no torch."""

import numpy as np
import torch

from megatron.data.tasks.task import TaskBatch
from megatron.data.tasks.task_config import TaskConfig
from megatron.options.data import SPLITS, Split


class TaskDataset(torch.utils.data.Dataset):
    """Task samples, generated when read: mappings of `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T].

    All sequences of an optimizer step have the same length. Lengths are equally likely unless the task weights them.
    Length and sequences depend on the seed, the split and the global index of the step's first sample. A resumed run
    therefore continues with the samples it would have had, and ranks draw the same samples however they divide a batch.
    Reading any sample generates the batch of its whole step, which takes little longer than one sample.

    Tasks that set the positions given to encodings add `position_ids`, int64 [T]. Labels are not shifted: each is the
    answer at its own position.

    Args:
        task_config: the task and its lengths.
        split: split name; different splits draw different sequences.
        total: number of samples.
        seed: seed of the run.
        batch_size: sequences per optimizer step.
        start: global index of the first sample of some step; further steps begin every `batch_size` samples.
    """

    def __init__(
        self, task_config: TaskConfig, split: Split, total: int, *, seed: int, batch_size: int, start: int = 0
    ) -> None:
        self.task_config, self.split, self.total = task_config, split, total
        self.seed, self.batch_size, self.start = seed, batch_size, start
        self._step: tuple[int, TaskBatch] | None = None
        """First sample and batch of the most recently drawn step."""

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
        """Draw the sequences of the step that begins at sample `first`."""
        # `first` may be negative after a change of the batch size; the seed must not be.
        entropy = [self.seed, SPLITS.index(self.split), first + self.batch_size]
        generator = np.random.Generator(np.random.PCG64(entropy))
        lengths, weights = self.task_config.lengths, self.task_config.length_weights
        length = lengths[generator.choice(len(lengths), p=weights) if weights else generator.integers(len(lengths))]
        return self.task_config.task.sample_batch(generator, self.batch_size, length)
