"""The documents of a corpus: one after the other, the first ones alone if there is a limit, each with its split.

Whole documents are dealt out to splits, never parts, so no text of a file is in training and in test. Each document
gets a pseudo-random number from its name and the seed alone; in the order of these numbers the first fraction is for
training, the next for validation, the rest for test. So the fractions are exact even for a few documents (drawing a
split for each document by itself would often leave a small corpus without a test split), the order in which files are
listed does not matter, and when a corpus grows a little, nearly all documents stay where they were.
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

ItemT = TypeVar("ItemT")
CorpusProgress = Callable[[str, int, int], None]
"""Called with the stage of the work, the bytes that are done, and those of the whole."""

SplitDocuments = Iterator[tuple[RawDocument, int]]
"""Documents, each with the index of its split."""


@dataclass(frozen=True)
class CorpusDocuments:
    """The documents that a corpus is made of."""

    files: list[SourceFile]
    column: str  # where a line or a row holds its text
    download_folder: Path  # for what is read of the hub
    progress: CorpusProgress
    limit: int | None = None  # the first so many documents alone

    @property
    def size(self) -> int:
        """Bytes of the sources, for progress; nobody knows that of the hub's."""
        return sum(file.size for file in self.files)

    def iter_names(self) -> Iterator[str]:
        """Names of all documents."""
        return _take_items(self._iter_all_names(), self.limit)

    def _iter_all_names(self) -> Generator[str, None, None]:
        done = 0
        for file in self.files:
            yield from list_document_names(file, self.column, self.download_folder, self._report_download)
            done += file.size
            self.report_progress("listing", done)

    def iter_documents(self) -> Iterator[RawDocument]:
        """All documents, in the order of their names."""
        documents = (
            document
            for file in self.files
            for document in iter_raw_documents(file, self.column, self.download_folder, self._report_download)
        )
        return _take_items(documents, self.limit)

    def report_progress(self, stage: str, done: int) -> None:
        """Report how much is done, in bytes of the sources."""
        if any(file.hub is not None and file.size == 0 for file in self.files):
            self.progress(f"{stage} ({done / 1e6:,.0f} MB)", 0, 1)
        else:
            self.progress(stage, done, self.size)

    def _report_download(self, documents: int) -> None:
        self.progress(f"reading ({documents:,} documents)", 0, 1)


def _take_items(items: Generator[ItemT, None, None], limit: int | None) -> Iterator[ItemT]:
    with contextlib.closing(items):
        yield from islice(items, limit)


@dataclass(frozen=True)
class SplitAssignment:
    """Which split each document goes to."""

    documents: CorpusDocuments
    splits: np.ndarray | None
    """uint8 [documents]: the split of each; None: all in one."""
    text_slices: list[bytes]
    """Of a lone text file its three slices, which are documents then; else empty."""

    def iter_documents(self) -> SplitDocuments:
        """All documents with the index of their split."""
        if self.text_slices:
            yield from self._iter_text_slices()
            return
        splits = repeat(0) if self.splits is None else self.splits.tolist()
        try:
            yield from zip(self.documents.iter_documents(), splits, strict=self.splits is not None)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise RunError("a source changed while it was read; prepare the corpus again") from None

    def _iter_text_slices(self) -> SplitDocuments:
        (file,) = self.documents.files
        line, offset = 1, 0
        for split, content in enumerate(self.text_slices):
            name, where = f"{file.name}:{SPLITS[split]}", str(file.path)
            yield RawDocument(name, where, "text", content, len(content), line, offset), split
            line, offset = line + content.count(b"\n"), offset + len(content)


def is_single_text(files: list[SourceFile]) -> bool:
    """Is there a lone text file, which is cut at line ends?"""
    return len(files) == 1 and files[0].format == "text"


def assign_splits(documents: CorpusDocuments, fractions: tuple[float, ...] | None, seed: int) -> SplitAssignment:
    """The split of each document; None for fractions puts all into one."""
    if fractions is None:
        return SplitAssignment(documents, None, [])
    if is_single_text(documents.files):
        slices = split_text_file(documents.files[0], fractions)
        return SplitAssignment(documents, np.arange(3, dtype=np.uint8), slices)
    return SplitAssignment(documents, assign_documents(documents.iter_names(), fractions, seed), [])


def check_fractions(fractions: Sequence[float]) -> tuple[float, ...]:
    """Three fractions divided by their sum. UserError unless they are three numbers, none negative, not all zero."""
    if (
        len(fractions) != 3
        or not all(np.isfinite(fraction) and fraction >= 0 for fraction in fractions)
        or sum(fractions) <= 0
    ):
        raise UserError(f"split: {list(fractions)} are not three shares (train, valid, test) such as 0.9, 0.05, 0.05")
    return tuple(fraction / sum(fractions) for fraction in fractions)


def compute_split_counts(num_documents: int, fractions: Sequence[float]) -> list[int]:
    """Documents per split, by largest remainder; a split whose fraction is not zero gets at least one."""
    num_splits = sum(fraction > 0 for fraction in fractions)
    if num_documents < num_splits:
        raise UserError(
            f"split: {num_documents} document{'s' * (num_documents != 1)} cannot be divided into {num_splits} splits; "
            "prepare each split by itself without dividing it (--split none)"
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
    """The split of each document, uint8 [documents]: 0, 1, 2 are the positions in `fractions`."""
    key = f"{seed}:".encode()
    # surrogateescape: file names need not be UTF-8
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
    """Return the number of documents that hold `num_tokens` tokens, or the limit of documents if all hold fewer.

    Which split a document goes to follows from how many there are, so that they are counted before any is written.
    Documents that cannot be decoded are added to `bad`, and hold no tokens.
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
