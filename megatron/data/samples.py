"""Training samples in an order that only ever grows.

megatron-core's GPTDataset cuts the concatenated documents of one or more shuffled epochs into samples and shuffles
those. Its order depends on the number of samples asked for, so a run that is extended from 1,000 to 2,000 steps would
read everything in another order, and what it had read already again. Here the order of a dataset is a chain of
GPTDatasets instead:

    link 0: built for the number of samples the run began with, shuffled with the run's seed
    link k: built for as many samples as links 0 … k−1 have together, shuffled with a seed made from (seed, k)

A link is used to its end, that is for whole epochs, before the next begins. So the order is a function of the seed
and the first count alone, however often and however far a run is extended, and the number of links grows only with
the logarithm of its length. A blend of datasets is megatron-core's BlendedDataset over such chains; its interleaving
is greedy, hence the same for the first n samples whatever the total.
"""

import hashlib
import json
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_core import BlendedDataset, GPTDataset, GPTDatasetConfig, IndexedDataset
from megatron.data.megatron_core import Split as CoreSplit
from megatron.data.parts import DatasetSlice, check_dataset_content
from megatron.data.sample_index import (
    UNREADABLE,
    IndexedSamples,
    find_index_damage,
    read_sample_index,
    write_sample_index,
)
from megatron.data.vocabulary import Vocabulary
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.data import Split
from megatron.utils.atomic_directory import atomic_directory
from megatron.utils.errors import FarfieldError, RunError, describe_cause

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _TokenizerFacts:
    """What GPTDatasetConfig wants to know of a tokenizer. No `pad`: no sample is ever padded."""

    vocab_size: int
    eod: int | None
    unique_identifiers: dict[str, Any]  # part of the name of megatron-core's files; `_key` has taken care of that


class ChainedGPTDataset(torch.utils.data.Dataset):
    """The samples of one dataset, see the module. `unique_identifiers` and `index_split` are for BlendedDataset."""

    def __init__(self, prefix: Path, links: Sequence[GPTDataset], vocab_size: int) -> None:
        self.prefix, self.datasets, self.vocab_size = prefix, list(links), vocab_size
        self.ends = np.cumsum([len(link) for link in links]).tolist()
        self.index_split = links[0].index_split
        self.unique_identifiers = {"links": [link.unique_identifiers for link in links]}

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Sample:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        link = bisect_right(self.ends, index)
        sample = self.datasets[link][index - (self.ends[link - 1] if link else 0)]
        tokens, labels = sample["tokens"], sample["labels"]
        # Only part of a large dataset was looked at before; here every token passes.
        largest = max(int(tokens.max()), int(labels.max()))
        if largest >= self.vocab_size or int(tokens.min()) < 0:
            wrong = largest if largest >= self.vocab_size else int(tokens.min())
            raise RunError(f"{self.prefix}: sample {index} has token {wrong}; the vocabulary has {self.vocab_size}")
        # megatron-core hands out its one cached mask: a copy, so that whoever writes into a sample harms nobody
        return {"tokens": tokens, "labels": labels, "loss_mask": sample["loss_mask"].clone()}


class TrainingDataset(torch.utils.data.Dataset):
    """The first `total` samples of a chain or a blend of chains, as dictionaries of three tensors."""

    def __init__(self, source: ChainedGPTDataset | BlendedDataset, total: int) -> None:
        self.dataset, self.total = source, total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.total:
            raise IndexError(f"sample {index} of {self.total}")
        sample = self.dataset[index]
        return {name: sample[name] for name in ("tokens", "labels", "loss_mask")}


def build_training_dataset(
    dataset_slices: Sequence[DatasetSlice],
    *,
    split: Split,
    seq_length: int,
    ordered: int,
    total: int,
    seed: int,
    cache: Path | None,
    groups: ProcessGroups,
    vocabulary: Vocabulary,
    eod_mask_loss: bool,
    notes: list[str],
) -> TrainingDataset:
    """`total` samples of a split, in the order that a run of `ordered` samples began with.

    What a person should know is added to `notes`.
    """
    weights = np.array([part.weight for part in dataset_slices]) / sum(part.weight for part in dataset_slices)
    chains = []
    for part, weight in zip(dataset_slices, weights, strict=True):
        # After n samples of a blend, the greedy interleaving has taken at most weight·n + 1 of a dataset.
        share = (lambda n: n) if len(dataset_slices) == 1 else (lambda n, weight=weight: int(weight * n) + 2)
        build = _GPTDatasetBuilder(part, split, seq_length, cache, groups, vocabulary, eod_mask_loss, notes)
        links = [build(share(ordered), seed)]
        while (length := sum(len(link) for link in links)) < share(total):
            mixed = np.random.SeedSequence([seed, len(links)]).generate_state(1)[0]
            links.append(build(length, int(mixed)))
        chains.append(ChainedGPTDataset(part.dataset.prefix, links, vocabulary.size))
    if len(chains) == 1:
        return TrainingDataset(chains[0], total)
    config = build.config(seed, None)  # without a cache: the interleaving is computed in less time than it is read
    return TrainingDataset(BlendedDataset(chains, weights.tolist(), total, config), total)


class _GPTDatasetBuilder:
    """Builds GPTDatasets of one part. All ranks must make the same calls."""

    def __init__(
        self,
        dataset_slice: DatasetSlice,
        split: Split,
        seq_length: int,
        cache: Path | None,
        groups: ProcessGroups,
        vocabulary: Vocabulary,
        eod_mask_loss: bool,
        notes: list[str],
    ) -> None:
        self.dataset_slice, self.split, self.seq_length, self.cache = dataset_slice, CoreSplit[split], seq_length, cache
        self.groups, self.eod_mask_loss, self.notes = groups, eod_mask_loss, notes
        self.tokenizer = _TokenizerFacts(vocabulary.size, vocabulary.eod, {})
        self.prefix = str(dataset_slice.dataset.prefix.resolve())  # however it is written, the index is the same
        self.dataset = IndexedDataset(self.prefix)

    def config(self, seed: int, folder: Path | None) -> GPTDatasetConfig:
        blends: list[Any] = [None, None, None]
        blends[self.split.value] = ([self.prefix], None)
        return GPTDatasetConfig(
            random_seed=seed,
            sequence_length=self.seq_length,
            blend_per_split=blends,
            path_to_cache=None if folder is None else str(folder),
            tokenizer=self.tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=self.eod_mask_loss,
            create_attention_mask=False,
        )

    def __call__(self, samples: int, seed: int) -> GPTDataset:
        """At least `samples` samples. The index comes from the cache, or is built there by the first process."""
        if self.cache is None:
            check_dataset_content(self.dataset_slice.dataset)
            try:
                with tempfile.TemporaryDirectory(prefix="farfield-samples-") as passing:
                    return GPTDataset(*self._arguments(samples, seed, Path(passing)))  # maps outlive files' names
            except OSError as error:
                place = f"{tempfile.gettempdir()}: the sample index cannot be written: {describe_cause(error)}"
                raise RunError(f"{place}; data_cache or TMPDIR names another folder") from None
        folder = self.cache / self._key(samples, seed)
        problem = self._write_index(folder, samples, seed) if self.groups.is_main else None
        if (problem := self.groups.find_first_error(problem)) is not None:
            raise RunError(problem)
        try:
            return IndexedSamples(read_sample_index(folder), *self._arguments(samples, seed, None))
        except UNREADABLE as error:  # by a rank that the first one's repair does not reach
            raise RunError(f"{folder}: a damaged sample index ({error}); delete the folder") from None

    def _arguments(self, samples: int, seed: int, folder: Path | None) -> tuple[Any, ...]:
        """What a GPTDataset is made from; `folder` is where it writes its index."""
        indices = np.arange(self.dataset_slice.first, self.dataset_slice.last, dtype=np.int32)
        return self.dataset, self.prefix, indices, samples, self.split, self.config(seed, folder)

    def _write_index(self, folder: Path, samples: int, seed: int) -> str | None:
        """Build the index unless a whole one is there. Returns what went wrong."""
        part = self.dataset_slice
        harm = None
        if folder.exists():
            harm = find_index_damage(folder, samples, part.dataset.lengths, part.first, part.last)
            if harm is None:
                return None
        try:
            check_dataset_content(part.dataset)  # once: the index belongs to the files' sizes and times
            with atomic_directory(folder, replace=harm is not None) as new:
                write_sample_index(new, lambda place: GPTDataset(*self._arguments(samples, seed, place)))
        except OSError as error:
            return f"{folder}: the sample index cannot be written: {describe_cause(error)}"
        except FarfieldError as error:
            return str(error)
        if harm is not None:
            self.notes.append(f"{folder}: the sample index was damaged ({harm}); it was built anew, in the same order")
        return None

    def _key(self, samples: int, seed: int) -> str:
        """Everything that the index depends on. A dataset is recognised by its place, its size and its time."""
        part = self.dataset_slice
        facts = [self.prefix, _stat_files(part.dataset), part.first, part.last]
        facts += [self.split.name, self.seq_length, samples, seed, self.eod_mask_loss]
        return f"{self.split.name}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def _stat_files(dataset: IndexedTokens) -> list[int]:
    stats = [Path(f"{dataset.prefix}{ending}").stat() for ending in (".idx", ".bin")]
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]
