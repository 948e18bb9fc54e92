"""The documents of a corpus: one after the other, the first ones alone if there is a limit, each with its split."""

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron.data.corpus_folder import Progress
from megatron.data.encode import Encoder, encode_chunks, iter_chunks
from megatron.data.paths import SPLITS
from megatron.data.sources import RawDocument, SourceFile, iter_raw_documents, limit_source, list_document_names
from megatron.data.splits import assign_documents
from megatron.data.tokenizers import Tokenizer
from megatron.utils.errors import RunError

Item = TypeVar("Item")
Documents = Iterator[tuple[RawDocument, int]]
"""Documents, each with the number of its split."""


@dataclass(frozen=True)
class CorpusDocuments:
    """The documents that a corpus is made of."""

    files: list[SourceFile]
    column: str  # where a line or a row holds its text
    download_folder: Path  # a folder for what is read of the hub
    report: Progress
    limit: int | None = None  # the first so many documents alone

    @property
    def size(self) -> int:
        """Bytes of the sources, for progress; nobody knows that of the hub's."""
        return sum(file.size for file in self.files)

    def names(self) -> Iterator[str]:
        """Of all documents."""
        return take_items(self._names(), self.limit)

    def _names(self) -> Generator[str, None, None]:
        done = 0
        for file in self.files:
            yield from list_document_names(file, self.column, self.download_folder, self._report_each)
            done += file.size
            self.report_progress("listing", done)

    def documents(self) -> Iterator[RawDocument]:
        """All documents, in the order of their names."""
        every = (
            doc
            for file in self.files
            for doc in iter_raw_documents(file, self.column, self.download_folder, self._report_each)
        )
        return take_items(every, self.limit)

    def report_progress(self, stage: str, done: int) -> None:
        """Report how much is done, in bytes of the sources."""
        if any(file.hub is not None and file.size == 0 for file in self.files):
            self.report(f"{stage} ({done / 1e6:,.0f} MB)", 0, 1)
        else:
            self.report(stage, done, self.size)

    def _report_each(self, documents: int) -> None:
        self.report(f"reading ({documents:,} documents)", 0, 1)


def take_items(items: Generator[Item, None, None], limit: int | None) -> Iterator[Item]:
    with contextlib.closing(items):
        yield from islice(items, limit)


@dataclass(frozen=True)
class SplitAssignment:
    """Which split each document goes to."""

    text: CorpusDocuments
    split_by_name: np.ndarray | None
    """uint8 [documents]: its split; None: all in one."""
    parts: list[bytes]
    """Of a lone text file its three parts, which are documents then; else empty."""

    def documents(self) -> Documents:
        """All documents with the number of their split."""
        if self.parts:
            yield from self._parts()
            return
        splits = repeat(0) if self.split_by_name is None else self.split_by_name.tolist()
        try:
            yield from zip(self.text.documents(), splits, strict=self.split_by_name is not None)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise RunError("a source changed while it was read; prepare the corpus again") from None

    def _parts(self) -> Documents:
        (file,) = self.text.files
        line, offset = 1, 0
        for split, content in enumerate(self.parts):
            name, where = f"{file.name}:{SPLITS[split]}", str(file.path)
            yield RawDocument(name, where, "text", content, len(content), line, offset), split
            line, offset = line + content.count(b"\n"), offset + len(content)


def is_single_text(files: list[SourceFile]) -> bool:
    """Is there a lone text file, which is cut at line ends?"""
    return len(files) == 1 and files[0].format == "text"


def assign_splits(text: CorpusDocuments, shares: tuple[float, ...] | None, seed: int) -> SplitAssignment:
    """The split of each document; None for shares puts all into one."""
    if shares is None:
        return SplitAssignment(text, None, [])
    if is_single_text(text.files):
        return SplitAssignment(text, np.arange(3, dtype=np.uint8), limit_source(text.files[0], shares))
    return SplitAssignment(text, assign_documents(text.names(), shares, seed), [])


def limit_tokens(tokens: int, text: CorpusDocuments, tokenizer: Tokenizer, workers: int) -> int | None:
    """How many documents, of those within the limit, hold so many tokens; that limit if all together do not.

    Which split a document goes to follows from how many there are, so that they are counted before any is written.
    """
    found, count, done = 0, 0, 0
    work = iter_chunks((document, 0) for document in text.documents())
    with contextlib.closing(encode_chunks(Encoder(tokenizer, np.int32, text.column), work, workers)) as results:
        for result in results:
            for length in result.lengths:
                found, count = found + length, count + 1
                if found >= tokens:
                    return count
            done += result.size
            text.report_progress("counting tokens", done)
    return text.limit
