"""PyTorch datasets of held-out text and of task samples, and the loader of batches.

Validation scores each token once, in a fixed order. A text is cut into windows of T tokens; the last window is padded
with positions that are not scored. Every token except a text's first is therefore a target exactly once, for any T.
Losses at different lengths cover the same tokens, which depend on neither the seed, nor the batch size, nor the number
of ranks.

A limit keeps a subset of the blocks of the longest T, evenly spread over the text: those whose index i has the smallest
fractional part of i · φ, with φ the golden ratio. A smaller limit keeps a subset of the blocks of a larger one.

Samples of tasks are generated when read. The other modules of a run's datasets need no torch.

Data are loaded in an order that depends only on the global sample index. With D data-parallel ranks, micro-step g of
the rank with index r reads the samples

    start + (g · D + r) · micro_batch   …   start + (g · D + r + 1) · micro_batch − 1

An optimizer step of `a` micro-steps therefore reads `a · D · micro_batch` consecutive samples. These are the same for
any D with the same global batch, and for a run that stopped after `start` samples and resumed. Context-parallel ranks,
which share a sequence, read the same samples and keep their own positions. Ranks that differ in another dimension of
the mesh read the same samples.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from megatron.data.load_tokenizer import Vocabulary
from megatron.data.tasks.task import TaskBatch
from megatron.data.tasks.task_config import TaskConfig
from megatron.distributed.mesh import Axis, Mesh, list_context_chunks
from megatron.options.data import SPLITS, Split
from megatron.utils.errors import RunError, UserError

Sample = dict[str, torch.Tensor]

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def choose_blocks(num_blocks: int, limit: int | None) -> np.ndarray:
    """Return the indices of the scored blocks, int64 [blocks], ascending: all blocks, or `limit` of them."""
    if limit is None or limit >= num_blocks:
        return np.arange(num_blocks)
    fractions = np.arange(num_blocks) * GOLDEN_RATIO % 1.0
    return np.sort(np.argsort(fractions, kind="stable")[:limit])


class ValidationDataset(torch.utils.data.Dataset):
    """Windows of held-out texts as dictionaries of `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T].

    The mask weights texts: its sum over all windows is proportional to the blend weights. It is 1 for a single text.

    Args:
        streams: tokens of each text, [N] integers with N > 1; may be memory-mapped.
        weights: blend weight of each text.
        length: window length T.
        vocabulary: vocabulary of the tokens, which were already checked against it.
        eod_mask_loss: if True, do not score the token that follows the end of a document.
        block_length: size of the blocks that a limit keeps or drops, in tokens; a multiple of T.
        max_blocks: maximum number of blocks; None scores all.
    """

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        weights: Sequence[float],
        length: int,
        vocabulary: Vocabulary,
        *,
        eod_mask_loss: bool = False,
        block_length: int | None = None,
        max_blocks: int | None = None,
    ) -> None:
        self.streams, self.length, self.vocabulary, self.eod_mask_loss = streams, length, vocabulary, eod_mask_loss
        self.block_length = block_length or length
        targets = np.array([len(stream) - 1 for stream in streams])
        self.token_weights = np.array(weights) / sum(weights) * (targets.sum() / targets)
        self.num_targets = int(targets.sum())
        self.block_ends = np.cumsum(-(-targets // self.block_length))
        self.blocks = choose_blocks(int(self.block_ends[-1]), max_blocks)

    @property
    def is_whole(self) -> bool:
        """True if every block is scored."""
        return len(self.blocks) == self.block_ends[-1]

    def __len__(self) -> int:
        return len(self.blocks) * (self.block_length // self.length)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, piece = divmod(int(index), self.block_length // self.length)
        block = int(self.blocks[number])
        text = int(np.searchsorted(self.block_ends, block, side="right"))
        first_block = int(self.block_ends[text - 1]) if text else 0
        start = (block - first_block) * self.block_length + piece * self.length
        window = torch.from_numpy(self.streams[text][start : start + self.length + 1].astype(np.int64))
        num_scored = max(0, len(window) - 1)
        tokens, labels = torch.zeros(2, self.length, dtype=torch.int64)
        loss_mask = torch.zeros(self.length)
        tokens[:num_scored], labels[:num_scored] = window[:-1], window[1:]
        loss_mask[:num_scored] = float(self.token_weights[text])
        if self.eod_mask_loss and self.vocabulary.eod is not None:
            loss_mask[tokens == self.vocabulary.eod] = 0.0
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}


class PaddedDataset(torch.utils.data.Dataset):
    """Dataset padded with samples that are not scored, up to a whole number of batches."""

    def __init__(self, dataset: torch.utils.data.Dataset, batch_size: int) -> None:
        self.dataset, self.num_samples = dataset, len(dataset)  # type: ignore[arg-type]
        self.total = -(-self.num_samples // batch_size) * batch_size

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        if index < self.num_samples:
            return self.dataset[index]
        sample: Sample = self.dataset[self.num_samples - 1]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


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


Batch = dict[str, torch.Tensor]

WHOLE_ROWS = "document_starts"
"""Name of the batch tensor that keeps whole rows when context-parallel ranks share them."""


class DistributedBatchSampler(Sampler[list[int]]):
    """Sampler of one data-parallel rank's micro-batches. A final round that is incomplete on any rank is dropped."""

    def __init__(self, num_samples: int, *, micro_batch_size: int, data: Axis, start: int) -> None:
        if micro_batch_size < 1 or start < 0:
            raise ValueError(f"micro_batch_size {micro_batch_size}, start {start}")
        self.micro_batch_size, self.data, self.start = micro_batch_size, data, start
        self.num_rounds = max(0, num_samples - start) // (micro_batch_size * data.size)

    def __len__(self) -> int:
        return self.num_rounds

    def __iter__(self) -> Iterator[list[int]]:
        for round_index in range(self.num_rounds):
            first = self.start + (round_index * self.data.size + self.data.index) * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))


def build_dataloader(
    dataset: Dataset, *, micro_batch_size: int, mesh: Mesh, start: int = 0, num_workers: int = 0
) -> Iterator[Batch]:
    """Build the micro-batches of one rank from global sample `start` to the end of the dataset.

    Yields dictionaries of stacked samples: `tokens` and `labels` int64 [B, T], `loss_mask` float32 [B, T], with B =
    micro_batch_size and T the number of positions on this rank. With document masking, batches also contain
    `document_starts`, int64 for whole rows (`attention/documents.py`). With a GPU, tensors are in pinned memory.
    `num_workers` processes prefetch batches without changing them. Drawing batches does not affect torch's random
    state.
    """
    sampler = DistributedBatchSampler(len(dataset), micro_batch_size=micro_batch_size, data=mesh.data, start=start)  # type: ignore[arg-type]
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(collate, context=mesh.context),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # otherwise the loader seeds its workers from the global generator
    )
    return unwrap_worker_errors(loader)


def collate(samples: list[Batch], context: Axis) -> Batch:
    """Stack samples into rows [B, T]; a context-parallel rank keeps only its own positions."""
    batch: Batch = default_collate(samples)
    if context.size == 1:
        return batch
    length = batch["tokens"].shape[1]
    chunks = [slice(start, start + size) for start, size in list_context_chunks(length, context)]
    return {
        name: rows if name == WHOLE_ROWS else torch.cat([rows[:, chunk] for chunk in chunks], dim=1)
        for name, rows in batch.items()
    }


def unwrap_worker_errors(loader: DataLoader) -> Iterator[Batch]:
    """Yield batches, and reduce a worker's error from a whole traceback to its message."""
    try:
        yield from loader
    except (RunError, UserError) as error:
        message = str(error).strip().splitlines()[-1]
        raise type(error)(message.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")) from None
