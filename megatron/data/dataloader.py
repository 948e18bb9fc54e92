"""Data loading in an order that depends only on the global sample index.

With D data-parallel ranks, micro-step g of the rank with index r reads the samples

    start + (g · D + r) · micro_batch   …   start + (g · D + r + 1) · micro_batch − 1

An optimizer step of `a` micro-steps therefore reads `a · D · micro_batch` consecutive samples. These are the same for
any D with the same global batch, and for a run that stopped after `start` samples and resumed. Context-parallel ranks,
which share a sequence, read the same samples and keep their own positions. Ranks that differ in another dimension of
the mesh read the same samples.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from megatron.distributed.mesh import Axis, Mesh, list_context_chunks
from megatron.utils.errors import RunError, UserError

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
