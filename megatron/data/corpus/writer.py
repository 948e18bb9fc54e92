"""Writing the datasets of a corpus, with a record of the progress so that interrupted work can be resumed.

    WORK/new/train_text_document.bin     the tokens so far, of every split
    WORK/lengths/train                   the lengths of the documents in them, int64
    WORK/progress.json                   how much of both counts, and how many documents of the sources that stands for

`progress.json` is written now and then, after the others are on the disk; what they hold beyond it is cut off when the
work is resumed. So a corpus that was interrupted is the same, byte for byte, as one that was not.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.data.corpus.sources import BadDocumentError
from megatron.data.corpus.tokenize_worker import EncodedChunk
from megatron.data.corpus_metadata import SplitCounts, SplitName, split_basename
from megatron.utils.atomic_io import parse_json, write_text_atomically

SAVE_INTERVAL = 30.0
"""Seconds."""

MAX_SHOWN_BAD = 5
"""Documents that cannot be decoded and are named."""
MAX_SEQUENCE_TOKENS = 1 << 30  # the index stores lengths as int32, so a longer document is several sequences
PROGRESS_FILE = "progress.json"


def read_progress(work: Path) -> dict[str, Any] | None:
    """The content of a working folder's progress.json; None if there is none, or its files hold less than it says."""
    try:
        progress: dict[str, Any] = parse_json((work / PROGRESS_FILE).read_text(encoding="utf-8"))
        for name, size in progress["bytes"].items():
            count = progress["counted"][name]["documents"]
            if (work / "new" / f"{split_basename(name)}.bin").stat().st_size < size:
                return None
            if (work / "lengths" / name).stat().st_size < 8 * count:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return progress


@dataclass
class BadDocuments:
    """Documents that were left out because they cannot be decoded."""

    limit: int
    count: int = 0
    first: list[str] = field(default_factory=list)
    """Problems of the first ones, with file and line."""

    def check(self, problems: Sequence[str]) -> None:
        """Raise BadDocumentError if these are more than may still be left out."""
        if (count := self.count + len(problems)) > self.limit:
            examples = "; ".join([*self.first, *problems][:MAX_SHOWN_BAD])
            raise BadDocumentError(f"at least {count:,} documents cannot be decoded, the first ones: {examples}")

    def add(self, problems: Sequence[str]) -> None:
        """Count documents, and name the first ones. Raises as `check`."""
        self.check(problems)
        self.count += len(problems)
        self.first = [*self.first, *problems][:MAX_SHOWN_BAD]

    def describe(self) -> str:
        """Return how many documents were left out, with the problems of the first ones."""
        documents = "1 document" if self.count == 1 else f"{self.count:,} documents"
        left_out = f"{documents} left out, as {'it' if self.count == 1 else 'they'} cannot be decoded"
        return f"{left_out}: {'; '.join(self.first)}"


class CorpusWriter:
    """Datasets of some splits, from the beginning or from where earlier work stopped.

    Args:
        work: the working folder; the datasets are in its folder `new`.
        names: the splits by their index in chunks.
        vocab_size: of the tokenizer, which decides how tokens are stored.
        extra_progress: what `progress.json` is to hold besides.
        progress: of earlier work that is resumed, as `read_progress` returns it.
        skip_bad: documents that may be left out because they cannot be decoded.
    """

    def __init__(
        self,
        work: Path,
        names: Mapping[int, SplitName],
        vocab_size: int,
        extra_progress: Mapping[str, Any],
        progress: Mapping[str, Any] | None = None,
        skip_bad: int = 0,
    ) -> None:
        from megatron.data.megatron_core import DType, IndexedDatasetBuilder  # takes seconds

        progress = progress or {"documents": 0, "done": 0, "skipped": [], "bytes": {}, "counted": {}}
        self._work, self._names, self._extra_progress = work, names, extra_progress
        self.dtype = DType.optimal_dtype(vocab_size)
        self.documents: int = progress["documents"]
        """Of the sources, those without text included."""
        self.bytes_done: int = progress["done"]
        """Bytes of the sources."""
        self.skipped: list[str] = list(progress["skipped"])
        self.bad = BadDocuments(skip_bad, progress.get("num_bad", 0), progress.get("bad", []))
        self.split_counts: dict[SplitName, SplitCounts] = {}
        self._builders: dict[int, Any] = {}
        self._lengths: dict[int, BinaryIO] = {}
        self._last_save = time.monotonic()
        (work / "lengths").mkdir(exist_ok=True)
        for split, name in names.items():
            self.split_counts[name] = SplitCounts(
                **progress["counted"].get(name, {"documents": 0, "tokens": 0, "bytes": 0})
            )
            builder = IndexedDatasetBuilder(os.devnull, self.dtype)  # it would empty the file
            builder.data_file.close()
            path = work / "new" / f"{split_basename(name)}.bin"
            builder.data_file = _open_truncated(path, progress["bytes"].get(name, 0))
            lengths_file = work / "lengths" / name
            self._lengths[split] = _open_truncated(lengths_file, 8 * self.split_counts[name].documents)
            for length in np.fromfile(lengths_file, dtype="<i8"):
                builder.sequence_lengths += _split_long_document(int(length))
                builder.document_indices.append(len(builder.sequence_lengths))
            self._builders[split] = builder

    def add(self, chunk: EncodedChunk) -> None:
        """Write a chunk's documents, and now and then the progress.

        Raises BadDocumentError, the chunk not written, for more documents than may be left out.
        """
        self.bad.check(chunk.bad)
        for split, encoded in chunk.by_split.items():
            start = 0
            for length in encoded.lengths:
                tokens = encoded.tokens[start : start + length]
                self._builders[split].add_document(tokens, _split_long_document(length))
                start += length
            np.asarray(encoded.lengths, dtype="<i8").tofile(self._lengths[split])
            counts = self.split_counts[self._names[split]]
            self.split_counts[self._names[split]] = SplitCounts(
                documents=counts.documents + len(encoded.lengths),
                tokens=counts.tokens + len(encoded.tokens),
                bytes=counts.bytes + encoded.bytes,
            )
        self.skipped += chunk.skipped
        self.bad.add(chunk.bad)
        self.documents += len(chunk.lengths)
        self.bytes_done += chunk.size
        if time.monotonic() - self._last_save >= SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Bring everything to the disk, and then the progress."""
        files = [self._builders[split].data_file for split in self._names] + list(self._lengths.values())
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        progress = {
            **self._extra_progress,
            "documents": self.documents,
            "done": self.bytes_done,
            "skipped": self.skipped,
            "num_bad": self.bad.count,
            "bad": self.bad.first,
            "bytes": {name: self._builders[split].data_file.tell() for split, name in self._names.items()},
            "counted": {name: count.model_dump() for name, count in self.split_counts.items()},
        }
        write_text_atomically(self._work / PROGRESS_FILE, json.dumps(progress))
        self._last_save = time.monotonic()

    def finish(self) -> None:
        """Write the indices."""
        for split, name in self._names.items():
            self._builders[split].finalize(str(self._work / "new" / f"{split_basename(name)}.idx"))

    def close(self) -> None:
        """Close all files, as far as the disk lets them."""
        for file in (*(builder.data_file for builder in self._builders.values()), *self._lengths.values()):
            with contextlib.suppress(OSError):  # on a full disk closing fails like writing did
                file.close()


def _open_truncated(path: Path, size: int) -> BinaryIO:
    """A file cut to a size, to be written from there on."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115
    file.truncate(size)
    file.seek(size)
    return file


def _split_long_document(length: int) -> list[int]:
    """Lengths of the sequences that a document is stored as: one, or several where it is too long for one."""
    full = [MAX_SEQUENCE_TOKENS] * (length // MAX_SEQUENCE_TOKENS)
    return [*full, length % MAX_SEQUENCE_TOKENS] if length % MAX_SEQUENCE_TOKENS else full
