"""Documents of a corpus in reading order, with an optional limit, and the split of each document.

Splits receive whole documents, so training and test never share text from one file. Each document gets a pseudo-random
number that depends only on its name and the seed. Sorted by this number, the first fraction of documents goes to
training, the next to validation, and the rest to test. Fractions are therefore exact even for few documents; drawing
each document's split independently would often leave a small corpus without a test split. The order in which files are
listed does not matter, and when a corpus grows slightly, nearly all documents keep their split.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron.data.corpus.sources import (
    RawDocument,
    SourceFile,
    iter_raw_documents,
    list_document_names,
    split_text_file,
)
from megatron.data.corpus.tokenize_worker import ChunkEncoder, encode_chunks, iter_chunks
from megatron.data.corpus.writer import BadDocuments
from megatron.data.tokenizers import Tokenizer
from megatron.options.data import SPLITS
from megatron.utils.errors import RunError, UserError
from megatron.utils.formatting import format_number, format_quantity

ItemT = TypeVar("ItemT")
CorpusProgress = Callable[[str, int, int], None]
"""Callback that receives the current stage, the bytes processed, and the total bytes."""

SplitDocuments = Iterator[tuple[RawDocument, int]]
"""Iterator of documents, each with its split index."""


@dataclass(frozen=True)
class CorpusDocuments:
    """Documents of a corpus."""

    files: list[SourceFile]
    column: str  # column or JSON key that contains the text
    download_folder: Path  # cache of texts read from the hub
    progress: CorpusProgress
    limit: int | None = None  # maximum number of documents

    @property
    def size(self) -> int:
        """Size of the sources in bytes, used for progress; 0 for hub datasets, whose size is unknown."""
        return sum(file.size for file in self.files)

    def iter_names(self) -> Iterator[str]:
        return _limit_items(self._iter_all_names(), self.limit)

    def _iter_all_names(self) -> Generator[str, None, None]:
        done = 0
        for file in self.files:
            yield from list_document_names(file, self.column, self.download_folder, self._report_download)
            done += file.size
            self.report_progress("listing files", done)

    def iter_documents(self) -> Iterator[RawDocument]:
        """Yield all documents, in the order of their names."""
        documents = (
            document
            for file in self.files
            for document in iter_raw_documents(file, self.column, self.download_folder, self._report_download)
        )
        return _limit_items(documents, self.limit)

    def report_progress(self, stage: str, done: int) -> None:
        """Report progress in bytes of the sources."""
        if any(file.hub is not None and file.size == 0 for file in self.files):
            self.progress(f"{stage} ({done / 1e6:,.0f} MB)", 0, 1)
        else:
            self.progress(stage, done, self.size)

    def _report_download(self, documents: int) -> None:
        self.progress(f"reading ({format_quantity(documents, 'document')})", 0, 1)


def _limit_items(items: Generator[ItemT, None, None], limit: int | None) -> Iterator[ItemT]:
    with contextlib.closing(items):
        yield from islice(items, limit)


@dataclass(frozen=True)
class SplitAssignment:
    """Assignment of documents to splits."""

    documents: CorpusDocuments
    splits: np.ndarray | None
    """Split index of each document, uint8 [documents]; None if all documents form one dataset."""
    text_slices: list[bytes]
    """The three slices of a single text file, each of which becomes a document; empty for other sources."""

    def iter_documents(self) -> SplitDocuments:
        """Yield all documents with their split index."""
        if self.text_slices:
            yield from self._iter_text_slices()
            return
        splits = repeat(0) if self.splits is None else self.splits.tolist()
        try:
            yield from zip(self.documents.iter_documents(), splits, strict=self.splits is not None)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise RunError("a source changed while it was being read; prepare the corpus again") from None

    def _iter_text_slices(self) -> SplitDocuments:
        (file,) = self.documents.files
        line, offset = 1, 0
        for split, content in enumerate(self.text_slices):
            name, where = f"{file.name}:{SPLITS[split]}", str(file.path)
            yield RawDocument(name, where, "text", content, len(content), line, offset), split
            line, offset = line + content.count(b"\n"), offset + len(content)


def is_single_text(files: list[SourceFile]) -> bool:
    """Return True if the only source is one text file, which is cut at line ends."""
    return len(files) == 1 and files[0].format == "text"


def assign_splits(documents: CorpusDocuments, fractions: tuple[float, ...] | None, seed: int) -> SplitAssignment:
    """Assign a split to each document; fractions of None put all documents in one dataset."""
    if fractions is None:
        return SplitAssignment(documents, None, [])
    if is_single_text(documents.files):
        slices = split_text_file(documents.files[0], fractions)
        return SplitAssignment(documents, np.arange(3, dtype=np.uint8), slices)
    return SplitAssignment(documents, assign_documents(documents.iter_names(), fractions, seed), [])


def check_fractions(fractions: Sequence[float]) -> tuple[float, ...]:
    """Return three fractions normalized to sum to 1.

    Raises UserError unless three nonnegative numbers are given that sum to 1, or whole numbers in any ratio.
    """
    given = ",".join(map(format_number, fractions))
    if (
        len(fractions) != 3
        or not all(np.isfinite(fraction) and fraction >= 0 for fraction in fractions)
        or sum(fractions) <= 0
    ):
        raise UserError(
            f"split: {given} is invalid; it must be three nonnegative fractions (train, valid, test), for "
            "example 0.9, 0.05, 0.05"
        )
    total = sum(fractions)
    if abs(total - 1) > 1e-6 and not all(float(fraction).is_integer() for fraction in fractions):
        raise UserError(
            f"split: {given} sums to {total:g}; fractions must sum to 1, or be whole numbers in a ratio, "
            "such as 969,30,1"
        )
    return tuple(fraction / total for fraction in fractions)


def compute_split_counts(num_documents: int, fractions: Sequence[float]) -> list[int]:
    """Return document counts per split by largest remainder; every nonzero fraction gets at least one document.

    Without documents all counts are 0. Raises UserError if there are fewer documents than nonzero fractions.
    """
    if num_documents == 0:
        return [0] * len(fractions)
    num_splits = sum(fraction > 0 for fraction in fractions)
    if num_documents < num_splits:
        raise UserError(
            f"split: {format_quantity(num_documents, 'document')} cannot be divided into {num_splits} splits; "
            "prepare each split separately with --split none"
        )
    exact = [fraction * num_documents for fraction in fractions]
    counts = [int(value) for value in exact]
    for i in sorted(range(len(fractions)), key=lambda i: counts[i] - exact[i])[: num_documents - sum(counts)]:
        counts[i] += 1
    for i, fraction in enumerate(fractions):
        if fraction > 0 and counts[i] == 0:
            counts[i] += 1
            counts[max(range(len(fractions)), key=counts.__getitem__)] -= 1
    return counts


def assign_documents(names: Iterable[str], fractions: Sequence[float], seed: int) -> np.ndarray:
    """Return the split index of each document, uint8 [documents]; 0, 1 and 2 index `fractions`."""
    key = f"{seed}:".encode()
    # surrogateescape: file names may not be valid UTF-8
    digests = (blake2b(key + name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names)
    numbers = np.fromiter((int.from_bytes(digest) for digest in digests), dtype=np.uint64)
    splits = np.empty(len(numbers), dtype=np.uint8)
    splits[np.argsort(numbers, kind="stable")] = np.repeat(
        np.arange(3, dtype=np.uint8), compute_split_counts(len(numbers), fractions)
    )
    return splits


def count_documents_for_tokens(
    num_tokens: int, documents: CorpusDocuments, tokenizer: Tokenizer, num_workers: int, bad: BadDocuments
) -> int | None:
    """Return the number of documents needed for `num_tokens` tokens, or the document limit if all documents hold fewer.

    A document's split depends on the number of documents, so they are counted before any is written. Documents that
    cannot be decoded are added to `bad` and count as zero tokens.
    """
    token_count, document_count, bytes_done = 0, 0, 0
    chunks = iter_chunks((document, 0) for document in documents.iter_documents())
    encoder = ChunkEncoder(tokenizer, np.int32, documents.column, skip_bad=bad.limit > 0)
    with contextlib.closing(encode_chunks(encoder, chunks, num_workers)) as encoded_chunks:
        for chunk in encoded_chunks:
            bad.add(chunk.bad)
            for length in chunk.lengths:
                token_count, document_count = token_count + length, document_count + 1
                if token_count >= num_tokens:
                    return document_count
            bytes_done += chunk.size
            documents.report_progress("counting tokens", bytes_done)
    return documents.limit
