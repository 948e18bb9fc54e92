"""The documents of a corpus: one after the other, the first ones alone if there is a limit, each with its split."""

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron.data.corpus_folder import Progress
from megatron.data.encode import Encoder, chunks, encode_all
from megatron.data.paths import SPLITS
from megatron.data.sources import RawDocument, SourceFile, cut, document_names, raw_documents
from megatron.data.splits import assign
from megatron.data.tokenizers import Tokenizer
from megatron.utils.errors import RunError

Item = TypeVar("Item")
Documents = Iterator[tuple[RawDocument, int]]
"""Documents, each with the number of its split."""


@dataclass(frozen=True)
class Text:
    """The documents that a corpus is made of."""

    files: list[SourceFile]
    column: str  # where a line or a row holds its text
    kept: Path  # a folder for what is read of the hub
    report: Progress
    limit: int | None = None  # the first so many documents alone

    @property
    def size(self) -> int:
        """Bytes of the sources, for progress; nobody knows that of the hub's."""
        return sum(file.size for file in self.files)

    def names(self) -> Iterator[str]:
        """Of all documents."""
        return _first(self._names(), self.limit)

    def _names(self) -> Generator[str, None, None]:
        done = 0
        for file in self.files:
            yield from document_names(file, self.column, self.kept, self._said)
            done += file.size
            self.tell("listing", done)

    def documents(self) -> Iterator[RawDocument]:
        """All documents, in the order of their names."""
        every = (doc for file in self.files for doc in raw_documents(file, self.column, self.kept, self._said))
        return _first(every, self.limit)

    def tell(self, stage: str, done: int) -> None:
        """Report how much is done, in bytes of the sources."""
        if any(file.hub is not None and file.size == 0 for file in self.files):
            self.report(f"{stage} ({done / 1e6:,.0f} MB)", 0, 1)
        else:
            self.report(stage, done, self.size)

    def _said(self, documents: int) -> None:
        self.report(f"reading ({documents:,} documents)", 0, 1)


def _first(items: Generator[Item, None, None], limit: int | None) -> Iterator[Item]:
    with contextlib.closing(items):
        yield from islice(items, limit)


@dataclass(frozen=True)
class Division:
    """Which split each document goes to."""

    text: Text
    assigned: np.ndarray | None
    """uint8 [documents]: its split; None: all in one."""
    parts: list[bytes]
    """Of a lone text file its three parts, which are documents then; else empty."""

    def documents(self) -> Documents:
        """All documents with the number of their split."""
        if self.parts:
            yield from self._parts()
            return
        splits = repeat(0) if self.assigned is None else self.assigned.tolist()
        try:
            yield from zip(self.text.documents(), splits, strict=self.assigned is not None)
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


def is_one_text(files: list[SourceFile]) -> bool:
    """Is there a lone text file, which is cut at line ends?"""
    return len(files) == 1 and files[0].format == "text"


def divide(text: Text, shares: tuple[float, ...] | None, seed: int) -> Division:
    """The split of each document; None for shares puts all into one."""
    if shares is None:
        return Division(text, None, [])
    if is_one_text(text.files):
        return Division(text, np.arange(3, dtype=np.uint8), cut(text.files[0], shares))
    return Division(text, assign(text.names(), shares, seed), [])


def holding(tokens: int, text: Text, tokenizer: Tokenizer, workers: int) -> int | None:
    """How many documents, of those within the limit, hold so many tokens; that limit if all together do not.

    Which split a document goes to follows from how many there are, so that they are counted before any is written.
    """
    found, count, done = 0, 0, 0
    work = chunks((document, 0) for document in text.documents())
    with contextlib.closing(encode_all(Encoder(tokenizer, np.int32, text.column), work, workers)) as results:
        for result in results:
            for length in result.lengths:
                found, count = found + length, count + 1
                if found >= tokens:
                    return count
            done += result.size
            text.tell("counting tokens", done)
    return text.limit
