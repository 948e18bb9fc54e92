"""The datasets of a corpus while they are written, and how far they are, so that interrupted work goes on.

    WORK/new/train_text_document.bin     the tokens so far, of every split
    WORK/lengths/train                   the lengths of the documents in them, int64
    WORK/progress.json                   how much of both counts, and how many documents of the sources that stands for

`progress.json` is written now and then, after the others are on the disk; what they hold beyond it is cut off when the
work goes on. So a corpus that was interrupted is the same, byte for byte, as one that was not.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.data.description import SplitCounts, SplitName
from megatron.data.encode import EncodedChunk
from megatron.data.paths import split_basename
from megatron.utils.atomic_io import parse_json, write_text_atomically

SAVE_INTERVAL = 30.0
"""Seconds."""

MAX_SEQUENCE_TOKENS = 1 << 30  # tokens; the index stores lengths as int32, so a longer document is several sequences
PROGRESS_FILE = "progress.json"


def read_progress(work: Path) -> dict[str, Any] | None:
    """How far a working folder is; None if that is nowhere, or its files are not what is said of them."""
    try:
        found: dict[str, Any] = parse_json((work / PROGRESS_FILE).read_text(encoding="utf-8"))
        for name, size in found["bytes"].items():
            count = found["counted"][name]["documents"]
            if (work / "new" / f"{split_basename(name)}.bin").stat().st_size < size:
                return None
            if (work / "lengths" / name).stat().st_size < 8 * count:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


class CorpusWriter:
    """Datasets of some splits, from the beginning or from where earlier work stopped.

    Args:
        work: the working folder; the datasets are in its folder `new`.
        names: the splits by the numbers that chunks have for them.
        vocab_size: of the tokenizer, which decides how tokens are stored.
        said: what `progress.json` is to remember besides.
        progress: how far the work is, as `read_progress` has it.
    """

    def __init__(
        self,
        work: Path,
        names: Mapping[int, SplitName],
        vocab_size: int,
        said: Mapping[str, Any],
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        from megatron.data.megatron_core import DType, IndexedDatasetBuilder  # takes seconds

        before = progress or {"documents": 0, "done": 0, "skipped": [], "bytes": {}, "counted": {}}
        self._work, self._names, self._said = work, names, said
        self.dtype = DType.optimal_dtype(vocab_size)
        self.documents: int = before["documents"]
        """Of the sources, those without text included."""
        self.documents_done: int = before["done"]
        """Bytes of the sources."""
        self.skipped: list[str] = list(before["skipped"])
        self.split_counts: dict[SplitName, SplitCounts] = {}
        self._builders: dict[int, Any] = {}
        self._lengths: dict[int, BinaryIO] = {}
        self._since = time.monotonic()
        (work / "lengths").mkdir(exist_ok=True)
        for number, name in names.items():
            self.split_counts[name] = SplitCounts(
                **before["counted"].get(name, {"documents": 0, "tokens": 0, "bytes": 0})
            )
            builder = IndexedDatasetBuilder(os.devnull, self.dtype)  # it would empty the file
            builder.data_file.close()
            path = work / "new" / f"{split_basename(name)}.bin"
            builder.data_file = _open_truncated(path, before["bytes"].get(name, 0))
            lengths = work / "lengths" / name
            self._lengths[number] = _open_truncated(lengths, 8 * self.split_counts[name].documents)
            for length in np.fromfile(lengths, dtype="<i8"):
                builder.sequence_lengths += _split_long_document(int(length))
                builder.document_indices.append(len(builder.sequence_lengths))
            self._builders[number] = builder

    def add(self, result: EncodedChunk) -> None:
        """Write a chunk's documents, and now and then how far that is."""
        for number, encoded in result.by_split.items():
            start = 0
            for length in encoded.lengths:
                tokens = encoded.tokens[start : start + length]
                self._builders[number].add_document(tokens, _split_long_document(length))
                start += length
            np.asarray(encoded.lengths, dtype="<i8").tofile(self._lengths[number])
            before = self.split_counts[self._names[number]]
            self.split_counts[self._names[number]] = SplitCounts(
                documents=before.documents + len(encoded.lengths),
                tokens=before.tokens + len(encoded.tokens),
                bytes=before.bytes + encoded.bytes,
            )
        self.skipped += result.skipped
        self.documents += len(result.lengths)
        self.documents_done += result.size
        if time.monotonic() - self._since >= SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Bring everything to the disk, and then how far it is."""
        files = [self._builders[number].data_file for number in self._names] + list(self._lengths.values())
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        found = {
            **self._said,
            "documents": self.documents,
            "done": self.documents_done,
            "skipped": self.skipped,
            "bytes": {name: self._builders[number].data_file.tell() for number, name in self._names.items()},
            "counted": {name: count.model_dump() for name, count in self.split_counts.items()},
        }
        write_text_atomically(self._work / PROGRESS_FILE, json.dumps(found))
        self._since = time.monotonic()

    def finish(self) -> None:
        """Write the indices."""
        for number, name in self._names.items():
            self._builders[number].finalize(str(self._work / "new" / f"{split_basename(name)}.idx"))

    def close(self) -> None:
        """Close all files, as far as the disk lets them."""
        for file in (*(builder.data_file for builder in self._builders.values()), *self._lengths.values()):
            with contextlib.suppress(OSError):  # on a full disk closing fails like writing did
                file.close()


def _open_truncated(path: Path, size: int) -> BinaryIO:
    """A file that is cut to a size, to be written from there on."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115
    file.truncate(size)
    file.seek(size)
    return file


def _split_long_document(length: int) -> list[int]:
    """How a document is stored: as one sequence, or as several where it is too long for one."""
    pieces = [MAX_SEQUENCE_TOKENS] * (length // MAX_SEQUENCE_TOKENS)
    return [*pieces, length % MAX_SEQUENCE_TOKENS] if length % MAX_SEQUENCE_TOKENS else pieces
