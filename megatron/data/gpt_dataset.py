"""Training samples in an append-only order, and the documents that each contains.

megatron-core's GPTDataset cuts the concatenated documents of one or more shuffled epochs into samples and shuffles
them. Its order depends on the number of requested samples. A run extended from 1,000 to 2,000 steps would therefore
read everything in a different order and repeat samples. Here, the order of a dataset is a chain of GPTDatasets:

    link 0: built for the number of samples the run began with, shuffled with the run's seed
    link k: built for as many samples as links 0 … k−1 have together, shuffled with a seed made from (seed, k)

Each link is used to its end, that is, for whole epochs, before the next one begins. The order therefore depends only on
the seed and the first count, no matter how often or how far a run is extended, and the number of links grows with the
logarithm of its length. A blend of datasets is megatron-core's BlendedDataset over such chains. Its interleaving is
greedy, so the first n samples are the same for any total.

`list_document_parts` resolves a sample's index through pieces, blend, chain and megatron-core's index to the dataset on
disk, and compares the tokens there with those of the sample.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from megatron.attention.documents import find_document_starts
from megatron.data.blend import DatasetSlice
from megatron.data.core_datasets import BlendedDataset, GPTDataset
from megatron.data.document_starts import MAX_COUNTED_DOCUMENTS, average_crossing_fractions, compute_crossing_fraction
from megatron.data.sample_index import GPTDatasetBuilder, Sample, SampleFormat
from megatron.data.stage_order import SourceOrder, count_ordered
from megatron.distributed.process_groups import ProcessGroups
from megatron.utils.errors import RunError


class ChainedGPTDataset(Dataset):
    """Samples of one dataset from number `start` on, as a chain of GPTDatasets (see the module).

    BlendedDataset reads `unique_identifiers` and `index_split`.
    """

    def __init__(self, links: Sequence[GPTDataset], start: int = 0) -> None:
        self.datasets, self.start = list(links), start
        self.ends = np.cumsum([len(link) for link in links]).tolist()
        self.index_split = links[0].index_split
        self.unique_identifiers = {"links": [link.unique_identifiers for link in links]}

    def __len__(self) -> int:
        return self.ends[-1] - self.start

    def __getitem__(self, index: int) -> Sample:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index += self.start
        link = bisect_right(self.ends, index)
        return self.datasets[link][index - (self.ends[link - 1] if link else 0)]

    def compute_crossing_fraction(self, seq_length: int) -> float | None:
        """Return the fraction of rows with more than one document, in the order of the first link."""
        link = self.datasets[0]
        documents = link.document_index[:MAX_COUNTED_DOCUMENTS]
        return compute_crossing_fraction(link.dataset.sequence_lengths[documents], seq_length)


class TrainingDataset(Dataset):
    """First `total` samples of a chain or of a blend of chains, as dictionaries of three tensors."""

    def __init__(
        self,
        source: ChainedGPTDataset | BlendedDataset,
        total: int,
        chains: Sequence[ChainedGPTDataset],
        weights: Sequence[float],
    ) -> None:
        self.dataset, self.total, self.chains, self.weights = source, total, chains, weights

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.total:
            raise IndexError(f"sample {index} of {self.total}")
        sample = self.dataset[index]
        return {name: sample[name] for name in ("tokens", "labels", "loss_mask")}

    def compute_crossing_fraction(self, seq_length: int) -> float | None:
        """Return the fraction of rows of `seq_length` tokens with more than one document, weighted by chain."""
        return average_crossing_fractions(
            self.weights, (chain.compute_crossing_fraction(seq_length) for chain in self.chains)
        )


class SplitSamplesDataset(Dataset):
    """Samples cut into `pieces` equal, consecutive pieces. Tensors have shape [T], with T divisible by `pieces`."""

    def __init__(self, dataset: Dataset, pieces: int) -> None:
        self.dataset, self.pieces = dataset, pieces
        self._last: tuple[int, Sample] | None = None  # pieces of one block are read consecutively

    def __len__(self) -> int:
        return len(self.dataset) * self.pieces  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        block, piece = divmod(index, self.pieces)
        if self._last is None or self._last[0] != block:
            self._last = block, self.dataset[block]
        sample = self._last[1]
        return {name: tensor.chunk(self.pieces)[piece] for name, tensor in sample.items()}


class DocumentDataset(Dataset):
    """Samples with `document_starts`, int64 [T]: the index of the first token of each token's document."""

    def __init__(self, dataset: Dataset, eod: int) -> None:
        self.dataset, self.eod = dataset, eod

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        sample = self.dataset[index]
        return {**sample, "document_starts": find_document_starts(sample["tokens"], self.eod)}


def build_training_dataset(
    dataset_slices: Sequence[DatasetSlice],
    sample_format: SampleFormat,
    *,
    ordered: int,
    total: int,
    seed: int,
    cache: Path | None,
    groups: ProcessGroups,
    notes: list[str],
    sources: Mapping[str, SourceOrder] | None = None,
) -> TrainingDataset:
    """Build `total` samples of a split, in the order of a run that began with `ordered` samples.

    Notes for the user are appended to `notes`. `sources` gives, for each dataset prefix, the position at which the
    current stage continues.
    """
    weights = np.array([dataset_slice.weight for dataset_slice in dataset_slices])
    weights = weights / sum(dataset_slice.weight for dataset_slice in dataset_slices)
    chains = []
    for dataset_slice, weight in zip(dataset_slices, weights, strict=True):
        builder = GPTDatasetBuilder(dataset_slice, sample_format, cache, groups, notes)
        first_length, needed = (count_ordered(n, float(weight), len(dataset_slices)) for n in (ordered, total))
        start = 0
        if sources is not None:
            source = sources[str(dataset_slice.dataset.prefix)]
            first_length, start = source.ordered, source.consumed
        links = [builder.build(first_length, seed)]
        while (length := sum(len(link) for link in links)) < start + needed:
            link_seed = np.random.SeedSequence([seed, len(links)]).generate_state(1)[0]
            links.append(builder.build(length, int(link_seed)))
        chains.append(ChainedGPTDataset(links, start))
    if len(chains) == 1:
        return TrainingDataset(chains[0], total, chains, [1.0])
    config = builder.build_config(seed, None)  # computing the interleaving is faster than reading it from a cache
    blend = BlendedDataset(chains, weights.tolist(), total, config)
    return TrainingDataset(blend, total, chains, weights.tolist())


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
    if isinstance(source, SplitSamplesDataset):
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
