"""Which text each stage of a run reads: the order goes on from stage to stage, and no token is read twice or left out
but those that a line says.

Texts are cut into blocks of the longest seq_length B of all stages, and the order of a run is an order of blocks
(`gpt_dataset`). A stage of length L reads each block as B / L sequences, one after the other, so that at whatever
length a part of the order is read, it is the same text: where the batch in tokens stays, step s reads the same tokens
whatever the lengths of the stages are.

    sequence i of a stage  =  piece i mod B/L of block ⌊i / (B/L)⌋ of its order

Where a stage ends within a sequence of the next one, the rest of that sequence is left out. Where the datasets or their
weights change, a blend begins that takes up each dataset behind the blocks that were read of it; what is left of a
block then is left out too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.data.blend import list_dataset_slices
from megatron.options.data import DataOptions


@dataclass(frozen=True)
class SourceOrder:
    """The place of a stage's beginning in one dataset's own order."""

    ordered: int
    """Blocks that the order was built for when the dataset was first read: it follows from that."""
    consumed: int = 0
    """Blocks that earlier stages have read of it."""


@dataclass(frozen=True)
class StageOrder:
    """The order of the text within a stage. A checkpoint holds it (`to_dict`)."""

    block_length: int
    sources: Mapping[str, SourceOrder]
    """By the prefix of the dataset."""
    first_sample: int = 0
    """Training sequences that the run had read when the stage began."""
    start: int = 0
    """Which sequence of its order, cut to the stage's length, is the stage's first."""

    def find_sequence(self, samples: int) -> int:
        """Which sequence of the order is the next, when the run has read so many."""
        return self.start + samples - self.first_sample

    def count_blocks(self, sequences: int, length: int) -> int:
        """Blocks that hold the first `sequences` sequences of a length, the last maybe in part."""
        return -(-sequences * length // self.block_length)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "StageOrder":
        """Of plain values. Raises TypeError, KeyError or AttributeError for others."""
        sources = {prefix: SourceOrder(**source) for prefix, source in values["sources"].items()}
        return StageOrder(**{**values, "sources": sources})


def begin_order(data: DataOptions, block_length: int, num_blocks: int, *, first_sample: int = 0) -> StageOrder:
    """A new order of the text of `num_blocks` blocks; `first_sample` sequences were read before it."""
    return StageOrder(block_length, _find_sources(data, num_blocks, {}), first_sample)


def continue_order(
    order: StageOrder,
    samples: int,
    *,
    before: tuple[DataOptions, int],
    now: tuple[DataOptions, int],
    num_blocks: int,
) -> tuple[StageOrder, int]:
    """The order of a stage that follows another.

    Args:
        order: of the stage before.
        samples: training sequences that the run has read.
        before, now: data and seq_length of the two stages.
        num_blocks: of the whole run, for datasets that were not read before.

    Returns:
        The order, and the tokens that are left out.
    """
    (old_data, old_length), (data, length) = before, now
    sequences = order.find_sequence(samples)
    read = sequences * old_length
    if _describe_data(old_data) == _describe_data(data):
        start = -(-read // length)
        return StageOrder(order.block_length, order.sources, samples, start), start * length - read
    blocks = order.count_blocks(sequences, old_length)
    slices = list_dataset_slices(old_data, "train")
    draws = count_blend_draws([dataset_slice.weight for dataset_slice in slices], blocks)
    consumed = dict(order.sources)
    for dataset_slice, count in zip(slices, draws, strict=True):
        source = consumed[str(dataset_slice.dataset.prefix)]
        consumed[str(dataset_slice.dataset.prefix)] = SourceOrder(source.ordered, source.consumed + count)
    sources = _find_sources(data, num_blocks, consumed)
    return StageOrder(order.block_length, consumed | sources, samples), blocks * order.block_length - read


def count_blend_draws(weights: Sequence[float], num_samples: int) -> list[int]:
    """How many samples a blend of these weights has taken of each dataset after so many."""
    if len(weights) == 1:
        return [num_samples]
    from megatron.data.megatron_core import build_blending_indices, normalize  # importing it takes seconds

    shares = normalize((np.array(weights) / sum(weights)).tolist())  # as `BlendedDataset` does of what it is given
    dataset_index, sample_index = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    build_blending_indices(dataset_index, sample_index, shares, len(shares), num_samples, False)
    return np.bincount(dataset_index, minlength=len(shares)).tolist()


def _describe_data(data: DataOptions) -> tuple[object, ...]:
    weights = data.weighted_sampler_alpha if data.weight_by_num_documents else data.train_data_weights
    return data.data_path, data.split, data.train_data_paths, weights


def _find_sources(data: DataOptions, num_blocks: int, known: Mapping[str, SourceOrder]) -> dict[str, SourceOrder]:
    """The datasets of a blend; those that were read before go on where they are."""
    slices = list_dataset_slices(data, "train")
    total = sum(dataset_slice.weight for dataset_slice in slices)
    sources = {}
    for dataset_slice in slices:
        prefix, weight = str(dataset_slice.dataset.prefix), dataset_slice.weight / total
        sources[prefix] = known.get(prefix) or SourceOrder(count_ordered(num_blocks, weight, len(slices)))
    return sources


def count_ordered(num_samples: int, weight: float, num_datasets: int) -> int:
    """Samples of a dataset that a blend of `num_samples` takes at most: the greedy interleaving has taken at most
    weight·n + 1 of a dataset after n samples."""
    return num_samples if num_datasets == 1 else int(weight * num_samples) + 2
