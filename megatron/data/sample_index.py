"""megatron-core's dataset of samples, and its index on disk.

The index of a GPTDataset is written once and treated as untrusted when read. megatron-core reads its own cache with
`numpy.load(allow_pickle=True)`, so anyone with write access to the cache can run code in the training process. Here,
megatron-core only builds an index in an empty folder; this module reads it. Arrays are memory-mapped by numpy's .npy
reader, which rejects objects. The first rank checks every file against the manifest and every number against its valid
range.

    train-3f0c…/document_index.npy   int32 [documents of all epochs]: sequences in reading order
                sample_index.npy     int32 or int64 [samples + 1, 2]: row of document_index, offset in that sequence
                shuffle_index.npy    uint32 or int64 [samples]: the sample to read
                index.json           size and SHA-256 of each file
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.data.blend import DatasetSlice
from megatron.data.core_datasets import GPTDataset, GPTDatasetConfig, IndexedDataset
from megatron.data.core_datasets import Split as CoreSplit
from megatron.data.corpus_metadata import FileDigest, compute_file_digest
from megatron.data.indexed_dataset import IndexedTokens
from megatron.data.load_tokenizer import Vocabulary, check_all_tokens
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.data import Split
from megatron.utils.atomic_directory import atomic_directory, read_folder_version, temporary_folder
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import FarfieldError, RunError, describe_cause

Sample = dict[str, torch.Tensor]

INDEX_MANIFEST = "index.json"
UNREADABLE = (OSError, ValueError, TypeError, OverflowError, MemoryError, RecursionError)
"""Exceptions that numpy's reader and json raise for invalid files."""


@dataclass(frozen=True)
class _TokenizerStub:
    """Tokenizer attributes that GPTDatasetConfig reads. There is no `pad` because samples are never padded."""

    vocab_size: int
    eod: int | None
    unique_identifiers: dict[str, Any]  # part of megatron-core's file names; `_cache_key` covers it


@dataclass(frozen=True)
class SampleFormat:
    """Format of a split's samples: their length and the source of their tokens."""

    split: Split
    seq_length: int
    vocabulary: Vocabulary
    eod_mask_loss: bool
    """True if tokens that end documents are excluded from the loss."""


class CheckedGPTDataset(GPTDataset):
    """GPTDataset that returns only tokens of the vocabulary, and gives each sample its own mask."""

    def __getitem__(self, idx: int) -> Sample:
        """Return `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T].

        megatron-core's own method computes the same in a dozen more operations per sample: it searches padding, which
        checked tokens do not contain, and returns positions, which the model does not read.
        """
        text = torch.from_numpy(self._query_document_sample_shuffle_indices(idx)[0]).long()
        tokens = text[:-1]
        if self.config.eod_mask_loss:
            loss_mask = (tokens != self.config.tokenizer.eod).float()
        else:
            loss_mask = torch.ones(len(tokens))
        return {"tokens": tokens, "labels": text[1:], "loss_mask": loss_mask}

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the tokens of a sample and check them."""
        tokens, documents = super()._query_document_sample_shuffle_indices(idx)
        size = self.config.tokenizer.vocab_size
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= size:
            token = smallest if smallest < 0 else largest
            raise RunError(f"{self.dataset_path}: sample {idx} has token {token}; the vocabulary has {size}")
        return tokens, documents


class SampleIndex(NamedTuple):
    """Three arrays that determine the samples (see the module)."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    document_index: FileDigest
    sample_index: FileDigest
    shuffle_index: FileDigest


class IndexedGPTDataset(CheckedGPTDataset):
    """Dataset with an existing index."""

    def __init__(self, index: SampleIndex, *arguments: object) -> None:
        self._index = index
        super().__init__(*arguments)

    def _build_document_sample_shuffle_indices(self) -> SampleIndex:
        return self._index


@contextmanager
def _temporary_folder(groups: ProcessGroups) -> Iterator[Path]:
    """Open a temporary folder of the first process for all processes. It is deleted when all of them have left."""
    with ExitStack() as stack:
        own, error = None, None
        if groups.is_main:
            try:
                own = stack.enter_context(temporary_folder("samples"))
            except OSError as failure:
                error = failure
        own_or_error = groups.gather_objects(error or own)[0]  # all processes stop if the first one failed
        if isinstance(own_or_error, OSError):
            raise own_or_error
        yield own_or_error
        groups.gather_objects(None)  # no process reads it anymore


class GPTDatasetBuilder:
    """Builder of GPTDatasets for one slice. All ranks must make the same calls."""

    def __init__(
        self,
        dataset_slice: DatasetSlice,
        sample_format: SampleFormat,
        cache: Path | None,
        groups: ProcessGroups,
        notes: list[str],
    ) -> None:
        self.dataset_slice, self.cache, self.groups, self.notes = dataset_slice, cache, groups, notes
        self.split, self.seq_length = CoreSplit[sample_format.split], sample_format.seq_length
        self.eod_mask_loss, self.vocabulary = sample_format.eod_mask_loss, sample_format.vocabulary
        self.tokenizer = _TokenizerStub(sample_format.vocabulary.size, sample_format.vocabulary.eod, {})
        self.prefix = str(dataset_slice.dataset.prefix.resolve())  # independent of how the path is written
        self.dataset = IndexedDataset(self.prefix)

    def build_config(self, seed: int, folder: Path | None) -> GPTDatasetConfig:
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

    def build(self, num_samples: int, seed: int) -> GPTDataset:
        """Build at least `num_samples` samples.

        The first process builds the index in the cache unless it is already there.
        """
        if self.cache is not None:
            return self._build_in(self.cache, num_samples, seed)
        try:
            with _temporary_folder(self.groups) as temporary:  # memory maps outlive file names
                if self.groups.world_size > 1:
                    return self._build_in(temporary, num_samples, seed)
                self._check_tokens()
                return CheckedGPTDataset(*self._get_arguments(num_samples, seed, temporary))
        except OSError as error:
            raise RunError(
                f"{tempfile.gettempdir()}: cannot write the sample index: {describe_cause(error)}; "
                "set data_cache or TMPDIR to another folder"
            ) from None

    def _build_in(self, cache: Path, num_samples: int, seed: int) -> GPTDataset:
        folder = cache / self._cache_key(num_samples, seed)
        problem = self._write_index(folder, num_samples, seed) if self.groups.is_main else None
        if (problem := self.groups.gather_objects(problem)[0]) is not None:
            raise problem
        try:
            return IndexedGPTDataset(read_sample_index(folder), *self._get_arguments(num_samples, seed, None))
        except FileNotFoundError:
            raise RunError(
                f"{folder}: not every process can see the sample index; set data_cache to a shared folder"
            ) from None
        except UNREADABLE as error:  # on a rank that cannot see the first rank's repair
            raise RunError(f"{folder}: damaged sample index ({error}); delete the folder") from None

    def _get_arguments(self, num_samples: int, seed: int, folder: Path | None) -> tuple[Any, ...]:
        """Return the arguments of a GPTDataset; it writes its index to `folder`."""
        indices = np.arange(self.dataset_slice.first, self.dataset_slice.last, dtype=np.int32)
        return self.dataset, self.prefix, indices, num_samples, self.split, self.build_config(seed, folder)

    def _check_tokens(self) -> None:
        dataset_slice = self.dataset_slice
        check_all_tokens(f"{dataset_slice.key}: {dataset_slice.dataset.prefix}", dataset_slice.dataset, self.vocabulary)

    def _write_index(self, folder: Path, num_samples: int, seed: int) -> FarfieldError | None:
        """Build the index unless an undamaged one exists. Returns the error, if any."""
        dataset_slice = self.dataset_slice
        damage, damaged_version = None, read_folder_version(folder)
        if folder.exists():
            lengths = dataset_slice.dataset.lengths
            damage = find_index_damage(folder, num_samples, lengths, dataset_slice.first, dataset_slice.last)
            if damage is None:
                return None
        try:
            self._check_tokens()  # once: the index depends on the files' sizes and times, and on the vocabulary
            # Another run that builds the same index builds identical files.
            with atomic_directory(folder, replaces=damaged_version, on_conflict="discard") as new:
                write_sample_index(new, lambda folder: GPTDataset(*self._get_arguments(num_samples, seed, folder)))
        except OSError as error:
            return RunError(f"{folder}: cannot write the sample index: {describe_cause(error)}")
        except FarfieldError as error:
            return error
        if damage is not None:
            self.notes.append(f"{folder}: the sample index was damaged ({damage}); it was rebuilt in the same order")
        return None

    def _cache_key(self, num_samples: int, seed: int) -> str:
        """Return a key of the inputs of the index. A dataset is identified by path, size and modification time."""
        dataset_slice = self.dataset_slice
        parts = [self.prefix, _stat_files(dataset_slice.dataset), dataset_slice.first, dataset_slice.last]
        parts += [self.split.name, self.seq_length, num_samples, seed, self.eod_mask_loss, self.vocabulary.size]
        return f"{self.split.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _stat_files(dataset: IndexedTokens) -> list[int]:
    stats = [Path(f"{dataset.prefix}{suffix}").stat() for suffix in (".idx", ".bin")]
    return [value for stat in stats for value in (stat.st_size, stat.st_mtime_ns)]


def write_sample_index(folder: Path, build: Callable[[Path], GPTDataset]) -> None:
    """Call `build` to have megatron-core write an index into an empty folder, then rename and record the files."""
    build(folder)
    (folder / INDEX_MANIFEST).unlink(missing_ok=True)
    digests: dict[str, FileDigest] = {}
    for path in list(folder.iterdir()):
        name = next((name for name in SampleIndex._fields if path.name.endswith(f"-{name}.npy")), None)
        if name is None:
            path.unlink()  # description file; `_cache_key` covers its content
        else:
            digests[name] = compute_file_digest(path.rename(folder / f"{name}.npy"))
    (folder / INDEX_MANIFEST).write_text(_Manifest(**digests).model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_sample_index(folder: Path) -> SampleIndex:
    """Memory-map an index. Raises one of UNREADABLE for invalid files."""
    return SampleIndex(*(open_memmap(folder / f"{name}.npy", mode="r") for name in SampleIndex._fields))


def find_index_damage(folder: Path, num_samples: int, lengths: np.ndarray, first: int, last: int) -> str | None:
    """Return a description of the damage to the index in a folder, or None if it is valid.

    A valid index has at least `num_samples` samples of the sequences first … last − 1 with the given lengths.
    """
    try:
        manifest = _Manifest.model_validate(parse_json((folder / INDEX_MANIFEST).read_text(encoding="utf-8")))
        for name in SampleIndex._fields:
            if compute_file_digest(folder / f"{name}.npy") != getattr(manifest, name):
                return f"{name}.npy does not match {INDEX_MANIFEST}"
        index = read_sample_index(folder)
    except ValidationError:
        return f"{INDEX_MANIFEST} is not a valid manifest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except UNREADABLE as error:
        return " ".join(str(error).split())
    return None if _fits_dataset(index, num_samples, lengths, first, last) else "its arrays do not match the data"


def _fits_dataset(index: SampleIndex, num_samples: int, lengths: np.ndarray, first: int, last: int) -> bool:
    documents, starts, shuffle = index
    dtypes_fit = documents.dtype == np.int32 and starts.dtype in (np.int32, np.int64) and shuffle.dtype.kind in "iu"
    shapes_fit = documents.ndim == shuffle.ndim == 1 and starts.ndim == 2 and starts.shape[1:] == (2,)
    if not dtypes_fit or not shapes_fit or len(starts) != len(shuffle) + 1 or len(shuffle) < max(num_samples, 1):
        return False
    if not len(documents) or documents.min() < first or documents.max() >= last:
        return False
    rows, offsets = starts[:, 0], starts[:, 1]
    if rows.min() < 0 or rows.max() >= len(documents) or shuffle.min() < 0 or shuffle.max() >= len(shuffle):
        return False
    return bool((np.diff(rows) >= 0).all() and offsets.min() >= 0 and (offsets <= lengths[documents[rows]]).all())
