"""Documents of a training sample: which part of which document each column of a row comes from.

A sample is cut from concatenated documents (`gpt_dataset.py`). This module follows a sample's index through pieces,
blend, chain and megatron-core's index to the dataset on disk, and compares the tokens there with the sample's.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.data.megatron_core import GPTDataset
from torch.utils.data import Dataset

from megatron.data.blend import DatasetSlice
from megatron.data.gpt_dataset import ChainedGPTDataset, CutDataset, DocumentDataset, TrainingDataset
from megatron.utils.errors import RunError


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of one document in a row."""

    corpus: Path
    """Prefix of the dataset."""
    document: int
    """Index of the document in the dataset, from 0."""
    first_token: int
    """Position in the document of the part's first token, from 0."""
    document_tokens: int
    """Length of the document in tokens."""
    column: int
    """Column of the row in which the part begins."""
    tokens: np.ndarray
    """Token ids, [N] integers."""


def list_document_parts(dataset: Dataset, index: int, slices: Sequence[DatasetSlice]) -> list[DocumentPart]:
    """List the parts of documents in the row `tokens` of a training sample, from left to right.

    Args:
        dataset: training samples of a text (`build_datasets`).
        index: index of the sample.
        slices: datasets of the training split, in the same order as those from which `dataset` was built.

    Raises RunError if the tokens on disk are not those of the sample.
    """
    row = dataset[index]["tokens"].numpy()  # first: megatron-core reads its index with the first sample
    source = dataset.dataset if isinstance(dataset, DocumentDataset) else dataset
    block, piece = index, 0
    if isinstance(source, CutDataset):
        block, piece = divmod(index, source.pieces)
        source = source.dataset
    assert isinstance(source, TrainingDataset)
    number, link, sample = _find_link(source, block)
    first = piece * len(row)
    parts = list(_cut_parts(link, sample, first, first + len(row), slices[number].dataset.prefix))
    if not np.array_equal(np.concatenate([part.tokens for part in parts]), row):
        raise RunError(f"{slices[number].dataset.prefix}: its documents do not match sample {index} of the training")
    return parts


def _find_link(dataset: TrainingDataset, index: int) -> tuple[int, GPTDataset, int]:
    """Return the number of the dataset from which a sample is drawn, the link of its chain, and the sample there."""
    number, source = 0, dataset.dataset
    if not isinstance(source, ChainedGPTDataset):
        number, index = int(source.dataset_index[index]), int(source.dataset_sample_index[index])
    chain = dataset.chains[number]
    index += chain.start
    link = bisect_right(chain.ends, index)
    return number, chain.datasets[link], index - (chain.ends[link - 1] if link else 0)


def _cut_parts(link: GPTDataset, sample: int, first: int, last: int, corpus: Path) -> Iterator[DocumentPart]:
    """Yield the parts of a sample's tokens first … last − 1."""
    row, offset = (int(number) for number in link.sample_index[link.shuffle_index[sample]])
    boundaries, lengths = link.dataset.document_indices, link.dataset.sequence_lengths
    column = 0
    while column < last:
        sequence = int(link.document_index[row])
        end = min(column + int(lengths[sequence]) - offset, last)
        begin = max(column, first)
        if begin < end:
            document = int(np.searchsorted(boundaries, sequence, side="right")) - 1
            members = slice(int(boundaries[document]), int(boundaries[document + 1]))
            before = int(lengths[members.start : sequence].sum(dtype=np.int64))
            skipped = offset + begin - column
            yield DocumentPart(
                corpus,
                document,
                first_token=before + skipped,
                document_tokens=int(lengths[members].sum(dtype=np.int64)),
                column=begin - first,
                tokens=link.dataset.get(sequence, offset=skipped, length=end - begin),
            )
        column, row, offset = end, row + 1, 0
