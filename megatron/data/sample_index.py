"""The index of a GPTDataset on disk, written once and read without trusting it.

megatron-core reads its own cache with `numpy.load(allow_pickle=True)`: whoever can write into the cache runs code in
the training process. Here megatron-core only builds an index, in a folder that is empty; reading is ours. Arrays are
mapped by numpy's reader of the .npy format, which refuses objects, and the first rank compares every file with the
manifest and every number with the range it must be in.

    train-3f0c…/document_index.npy   int32 [documents of all epochs]: the sequences in the order they are read
                sample_index.npy     int32 or int64 [samples + 1, 2]: place in document_index, offset in that sequence
                shuffle_index.npy    uint32 or int64 [samples]: the sample to read
                index.json           size and SHA-256 of each
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap
from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.data.description import FileFacts, file_facts
from megatron.data.megatron_core import GPTDataset
from megatron.utils.atomic_io import parse_json

MANIFEST = "index.json"
UNREADABLE = (OSError, ValueError, TypeError, OverflowError, MemoryError, RecursionError)
"""What numpy's reader and json raise for files that are not theirs."""


class SampleIndex(NamedTuple):
    """Three arrays, see the module."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    document_index: FileFacts
    sample_index: FileFacts
    shuffle_index: FileFacts


class IndexedSamples(GPTDataset):
    """A GPTDataset over an index that is there already."""

    def __init__(self, index: SampleIndex, *arguments: object) -> None:
        self._index = index
        super().__init__(*arguments)

    def _build_document_sample_shuffle_indices(self) -> SampleIndex:
        return self._index


def write_sample_index(folder: Path, build: Callable[[Path], GPTDataset]) -> None:
    """Let `build` have megatron-core write an index into an empty folder, then name and record the files."""
    build(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    found: dict[str, FileFacts] = {}
    for path in list(folder.iterdir()):
        name = next((name for name in SampleIndex._fields if path.name.endswith(f"-{name}.npy")), None)
        if name is None:
            path.unlink()  # its description, which `_key` has taken care of
        else:
            found[name] = file_facts(path.rename(folder / f"{name}.npy"))
    (folder / MANIFEST).write_text(_Manifest(**found).model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_sample_index(folder: Path) -> SampleIndex:
    """Map an index. Raises one of UNREADABLE for files that cannot be one."""
    return SampleIndex(*(open_memmap(folder / f"{name}.npy", mode="r") for name in SampleIndex._fields))


def find_index_damage(folder: Path, samples: int, lengths: np.ndarray, first: int, last: int) -> str | None:
    """What is wrong with the index in a folder, which must have at least `samples` samples of the sequences
    first … last − 1 of the given lengths; None if nothing is."""
    try:
        manifest = _Manifest.model_validate(parse_json((folder / MANIFEST).read_text(encoding="utf-8")))
        for name in SampleIndex._fields:
            if file_facts(folder / f"{name}.npy") != getattr(manifest, name):
                return f"{name}.npy is not what {MANIFEST} recorded"
        index = read_sample_index(folder)
    except ValidationError:
        return f"{MANIFEST} does not describe one"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except UNREADABLE as error:
        return " ".join(str(error).split())
    return None if _fits_dataset(index, samples, lengths, first, last) else "its arrays do not fit the data"


def _fits_dataset(index: SampleIndex, samples: int, lengths: np.ndarray, first: int, last: int) -> bool:
    documents, begins, shuffled = index
    kinds = documents.dtype == np.int32 and begins.dtype in (np.int32, np.int64) and shuffled.dtype.kind in "iu"
    shapes = documents.ndim == shuffled.ndim == 1 and begins.ndim == 2 and begins.shape[1:] == (2,)
    if not kinds or not shapes or len(begins) != len(shuffled) + 1 or len(shuffled) < max(samples, 1):
        return False
    if not len(documents) or documents.min() < first or documents.max() >= last:
        return False
    places, offsets = begins[:, 0], begins[:, 1]
    if places.min() < 0 or places.max() >= len(documents) or shuffled.min() < 0 or shuffled.max() >= len(shuffled):
        return False
    return bool((np.diff(places) >= 0).all() and offsets.min() >= 0 and (offsets <= lengths[documents[places]]).all())
