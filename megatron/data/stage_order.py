"""Order of the text across the stages of a run: no token is read twice, and skipped tokens are reported.

Texts are cut into blocks of B tokens, the longest seq_length of all stages, and a run's order is an order of blocks
(`gpt_dataset`). A stage with length L reads each block as B / L consecutive sequences. The text is therefore the same
at any length: with the same batch size in tokens, step s reads the same tokens whatever the lengths of the stages are.

    sequence i of a stage  =  piece i mod B/L of block ⌊i / (B/L)⌋ of its order

If a stage ends within a sequence of the next stage, the rest of that sequence is skipped. If the datasets or their
weights change, a new blend begins, and each dataset continues after the blocks already read. The rest of a partially
read block is skipped as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.blend import list_dataset_slices
from megatron.data.indexed_dataset import compute_dataset_digest
from megatron.options.data import DataOptions, list_corpus_names


@dataclass(frozen=True)
class SourceOrder:
    """Starting position of a stage in one dataset's own order."""

    ordered: int
    """Number of blocks for which the order was built when the dataset was first read. It determines the order."""
    consumed: int = 0
    """Number of blocks that earlier stages have read."""


@dataclass(frozen=True)
class StageOrder:
    """Order of the text within a stage. It is stored in checkpoints (`to_dict`)."""

    block_length: int
    sources: Mapping[str, SourceOrder]
    """Starting position in each dataset, by dataset prefix."""
    first_sample: int = 0
    """Number of training sequences the run had read when the stage began."""
    start: int = 0
    """Index of the stage's first sequence in its order, in sequences of the stage's length."""

    def find_sequence(self, samples: int) -> int:
        """Return the index of the next sequence in the order after the run has read `samples` sequences."""
        return self.start + samples - self.first_sample

    def count_blocks(self, sequences: int, length: int) -> int:
        """Return the number of blocks, a partial one included, for the first `sequences` sequences of a length."""
        return -(-sequences * length // self.block_length)

    def rename_datasets(self, names: Mapping[str, str]) -> "StageOrder":
        """Return the same order with other prefixes for some datasets."""
        sources = {names.get(prefix, prefix): source for prefix, source in self.sources.items()}
        return replace(self, sources=sources)

    def to_dict(self) -> dict[str, Any]:
        """Return the order as plain values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "StageOrder":
        """Build an order from plain values. Raises TypeError, KeyError or AttributeError for invalid values."""
        sources = {prefix: SourceOrder(**source) for prefix, source in values["sources"].items()}
        return StageOrder(**{**values, "sources": sources})


def list_dataset_prefixes(data: DataOptions) -> list[str]:
    """Return the prefixes of the training datasets that a configuration names, without .bin and .idx."""
    corpora = data.train_data_paths if data.data_path is None else [data.data_path]
    return [_get_prefix(name) for corpus in corpora for name in list_corpus_names(corpus)]


def find_moved_datasets(
    stages: Iterable[tuple[DataOptions, DataOptions]], digests: Mapping[str, str]
) -> dict[str, str]:
    """Return the new prefix of each training dataset that was moved.

    A dataset was moved if it does not exist and the same stage now names one in its place. Its content must be the
    same, if that is known.

    Args:
        stages: data options of each stage, earlier and now.
        digests: known content of datasets by earlier prefix (`compute_dataset_digest`).
    """
    moved: dict[str, str] = {}
    for pair in stages:
        before, now = map(list_dataset_prefixes, pair)
        for old, new in zip(before, now, strict=True) if len(before) == len(now) else ():
            if not Path(f"{old}.idx").exists() and Path(f"{new}.idx").exists():
                digest = compute_dataset_digest(Path(new))
                if digests.get(old, digest) == digest:
                    moved[old] = new
    return moved


def rename_datasets(data: DataOptions, names: Mapping[str, str]) -> DataOptions:
    """Return data options with other prefixes for some training datasets."""

    def rename(corpus: str | list[str]) -> str | list[str]:
        renamed = [names.get(_get_prefix(name), name) for name in list_corpus_names(corpus)]
        return renamed[0] if isinstance(corpus, str) else renamed

    if data.data_path is not None:
        return data.replace(data_path=rename(data.data_path))
    return data.replace(train_data_paths=[rename(corpus) for corpus in data.train_data_paths])


def _get_prefix(name: str) -> str:
    return str(Path(name.removesuffix(".bin").removesuffix(".idx")))


def begin_order(data: DataOptions, block_length: int, num_blocks: int, *, first_sample: int = 0) -> StageOrder:
    """Build a new order of `num_blocks` blocks that begins after `first_sample` sequences."""
    return StageOrder(block_length, _find_sources(data, num_blocks, {}), first_sample)


def continue_order(
    order: StageOrder,
    samples: int,
    *,
    before: tuple[DataOptions, int],
    now: tuple[DataOptions, int],
    num_blocks: int,
) -> tuple[StageOrder, int]:
    """Build the order of a stage that follows another.

    Args:
        order: order of the previous stage.
        samples: training sequences that the run has read.
        before, now: data options and seq_length of the two stages.
        num_blocks: number of blocks of the whole run, used for datasets not read before.

    Returns:
        The order, and the number of skipped tokens.
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
    """Return the number of samples that a blend draws from each dataset within its first `num_samples` samples."""
    if len(weights) == 1:
        return [num_samples]
    from megatron.data.core_datasets import build_blending_indices, normalize  # import takes seconds

    shares = normalize((np.array(weights) / sum(weights)).tolist())  # matches the normalization in `BlendedDataset`
    dataset_index, sample_index = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    build_blending_indices(dataset_index, sample_index, shares, len(shares), num_samples, False)
    return np.bincount(dataset_index, minlength=len(shares)).tolist()


def _describe_data(data: DataOptions) -> tuple[object, ...]:
    weights = data.weighted_sampler_alpha if data.weight_by_num_documents else data.train_data_weights
    return data.data_path, data.split, data.train_data_paths, weights


def _find_sources(data: DataOptions, num_blocks: int, known: Mapping[str, SourceOrder]) -> dict[str, SourceOrder]:
    """Return the starting positions of a blend's datasets; known datasets keep theirs."""
    slices = list_dataset_slices(data, "train")
    total = sum(dataset_slice.weight for dataset_slice in slices)
    sources = {}
    for dataset_slice in slices:
        prefix, weight = str(dataset_slice.dataset.prefix), dataset_slice.weight / total
        sources[prefix] = known.get(prefix) or SourceOrder(count_ordered(num_blocks, weight, len(slices)))
    return sources


def count_ordered(num_samples: int, weight: float, num_datasets: int) -> int:
    """Return an upper bound on the samples drawn from a dataset by a blend of `num_samples`.

    The greedy interleaving draws at most weight·n + 1 samples of a dataset within n samples.
    """
    return num_samples if num_datasets == 1 else int(weight * num_samples) + 2
