"""Writer for the datasets of a corpus, with a progress record that makes interrupted work resumable.

    WORK/new/train_text_document.bin     tokens written so far, one file per split
    WORK/lengths/train                   lengths of the documents in it, int64
    WORK/progress.json                   valid size of both files, and the number of source documents processed

`progress.json` is written periodically, after the other files are synced to disk. When work is resumed, the files are
truncated to the recorded sizes. An interrupted corpus is therefore byte-identical to an uninterrupted one.
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
from megatron.data.corpus_metadata import SplitCounts, SplitName, get_split_basename
from megatron.utils.atomic_io import parse_json, write_text_atomically

SAVE_INTERVAL = 30.0
"""Time between progress records, in seconds."""

MAX_SHOWN_BAD = 5
"""Maximum number of undecodable documents named in a message."""
MAX_SEQUENCE_TOKENS = 1 << 30  # the index stores lengths as int32; longer documents become several sequences
PROGRESS_FILE = "progress.json"


def read_progress(work: Path) -> dict[str, Any] | None:
    """Return the content of a work folder's progress.json.

    Return None if it is missing or the files are shorter than recorded.
    """
    try:
        progress: dict[str, Any] = parse_json((work / PROGRESS_FILE).read_text(encoding="utf-8"))
        for name, size in progress["bytes"].items():
            count = progress["counted"][name]["documents"]
            if (work / "new" / f"{get_split_basename(name)}.bin").stat().st_size < size:
                return None
            if (work / "lengths" / name).stat().st_size < 8 * count:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return progress


@dataclass
class BadDocuments:
    """Documents that were skipped because they cannot be decoded."""

    limit: int
    count: int = 0
    first: list[str] = field(default_factory=list)
    """Messages for the first of them, with file and line."""

    def check(self, problems: Sequence[str]) -> None:
        """Raise BadDocumentError if skipping these documents would exceed the limit."""
        if (count := self.count + len(problems)) > self.limit:
            examples = "; ".join([*self.first, *problems][:MAX_SHOWN_BAD])
            raise BadDocumentError(f"at least {count:,} documents cannot be decoded, including: {examples}")

    def add(self, problems: Sequence[str]) -> None:
        """Count documents and remember the first ones. Raises the same error as `check`."""
        self.check(problems)
        self.count += len(problems)
        self.first = [*self.first, *problems][:MAX_SHOWN_BAD]

    def describe(self) -> str:
        """Return the number of skipped documents and the messages for the first ones."""
        documents = "1 document" if self.count == 1 else f"{self.count:,} documents"
        left_out = f"{documents} skipped because {'it' if self.count == 1 else 'they'} cannot be decoded"
        return f"{left_out}: {'; '.join(self.first)}"


class CorpusWriter:
    """Writer for the datasets of a corpus's splits, from the start or from where earlier work stopped.

    Args:
        work: work folder; the datasets are in its subfolder `new`.
        names: split names by their index in chunks.
        vocab_size: vocabulary size, which determines how tokens are stored.
        extra_progress: further entries for `progress.json`.
        progress: progress of earlier work to resume, as returned by `read_progress`.
        skip_bad: maximum number of undecodable documents to skip.
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
        from megatron.data.core_datasets import DType, IndexedDatasetBuilder  # takes seconds

        progress = progress or {"documents": 0, "done": 0, "skipped": [], "bytes": {}, "counted": {}, "blank": True}
        self._work, self._names, self._extra_progress = work, names, extra_progress
        self.dtype = DType.optimal_dtype(vocab_size)
        self.documents: int = progress["documents"]
        """Number of source documents processed, including empty ones."""
        self.bytes_done: int = progress["done"]
        """Bytes of the sources processed."""
        self.skipped: list[str] = list(progress["skipped"])
        self.bad = BadDocuments(skip_bad, progress.get("num_bad", 0), progress.get("bad", []))
        self.is_blank: bool = progress.get("blank", False)
        """True if no document contains more than white space."""
        self.split_counts: dict[SplitName, SplitCounts] = {}
        self._builders: dict[int, Any] = {}
        self._lengths: dict[int, BinaryIO] = {}
        self._last_save = time.monotonic()
        (work / "lengths").mkdir(exist_ok=True)
        for split, name in names.items():
            self.split_counts[name] = SplitCounts(
                **progress["counted"].get(name, {"documents": 0, "tokens": 0, "bytes": 0})
            )
            builder = IndexedDatasetBuilder(os.devnull, self.dtype)  # opening the real file would empty it
            builder.data_file.close()
            path = work / "new" / f"{get_split_basename(name)}.bin"
            builder.data_file = _open_truncated(path, progress["bytes"].get(name, 0))
            lengths_file = work / "lengths" / name
            self._lengths[split] = _open_truncated(lengths_file, 8 * self.split_counts[name].documents)
            for length in np.fromfile(lengths_file, dtype="<i8"):
                builder.sequence_lengths += _split_long_document(int(length))
                builder.document_indices.append(len(builder.sequence_lengths))
            self._builders[split] = builder

    def add(self, chunk: EncodedChunk) -> None:
        """Write a chunk's documents, and periodically the progress.

        Raises BadDocumentError, without writing the chunk, if the limit of skipped documents is exceeded.
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
        self.is_blank &= chunk.is_blank
        self.documents += len(chunk.lengths)
        self.bytes_done += chunk.size
        if time.monotonic() - self._last_save >= SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Sync all files to disk, then write the progress."""
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
            "blank": self.is_blank,
            "bytes": {name: self._builders[split].data_file.tell() for split, name in self._names.items()},
            "counted": {name: count.model_dump() for name, count in self.split_counts.items()},
        }
        write_text_atomically(self._work / PROGRESS_FILE, json.dumps(progress))
        self._last_save = time.monotonic()

    def finish(self) -> None:
        """Write the index files."""
        for split, name in self._names.items():
            self._builders[split].finalize(str(self._work / "new" / f"{get_split_basename(name)}.idx"))

    def close(self) -> None:
        """Close all files, ignoring disk errors."""
        for file in (*(builder.data_file for builder in self._builders.values()), *self._lengths.values()):
            with contextlib.suppress(OSError):  # on a full disk, closing fails as writing did
                file.close()


def _open_truncated(path: Path, size: int) -> BinaryIO:
    """Truncate a file to a size and open it for appending."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115
    file.truncate(size)
    file.seek(size)
    return file


def _split_long_document(length: int) -> list[int]:
    """Return the lengths of the sequences in which a document is stored: one, or several if it is too long."""
    full = [MAX_SEQUENCE_TOKENS] * (length // MAX_SEQUENCE_TOKENS)
    return [*full, length % MAX_SEQUENCE_TOKENS] if length % MAX_SEQUENCE_TOKENS else full
