"""Texts of a dataset on Hugging Face's hub, or of a local folder that its library reads, streamed with `datasets`.

What was read is kept in pieces beside the place that the library had come to, so that a text is fetched once: later
passes read the pieces, and a reading that was interrupted goes on behind the last one.

    000000.jsonl.zst   texts, a JSON string per line
    000000.json        how many documents there are up to here, the library's state, and whether the dataset ends here

Nothing of a dataset is run, and nothing is asked of the network but what the user named. Needs the package datasets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from megatron.utils.atomic_io import parse_json, write_bytes_atomically
from megatron.utils.errors import RunError, UserError, describe_cause
from megatron.utils.imports import require_package
from megatron.utils.suggestions import format_choices

PREFIX = "hf:"
SHARD_BYTES = 1 << 24
SHARD_SECONDS = 30.0
"""A piece is written when there is so much text for it, or after so long."""


class UnfinishedError(RunError):
    """Work that was interrupted, and that the same command goes on with."""


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset, as a source of text."""

    source: str  # as it was written: hf:NAME or hf:NAME:CONFIG
    split: str

    @property
    def name(self) -> str:
        """The dataset's, or a folder."""
        return self.source.removeprefix(PREFIX).partition(":")[0]

    @property
    def config(self) -> str | None:
        """Which of a dataset's configurations; None for its only one."""
        return self.source.removeprefix(PREFIX).partition(":")[2] or None

    @property
    def files(self) -> list[Path]:
        """Of a folder; none of what lies on the hub."""
        folder = Path(self.name)
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []

    def iter_texts(
        self, column: str, download_folder: Path, report: Callable[[int], None] = lambda documents: None
    ) -> Iterator[str]:
        """The text of every row, empty where there is none.

        Args:
            column: that holds the text.
            download_folder: a folder for what was read; what is there is not fetched again.
            report: called with the number of documents whenever some are kept.

        Raises:
            UserError: there is no such dataset, configuration, split, or column of text; datasets is not installed.
            UnfinishedError: it cannot be reached any more; what was read is kept.
        """
        pieces = _DownloadedShards(download_folder)
        yield from pieces.iter_texts()
        if pieces.ended:
            return
        stream = self._open_stream()
        if pieces.state is not None:
            stream.load_state_dict(pieces.state)
        try:
            yield from self._read(stream, column, pieces, report)
        finally:  # also where the reader has enough
            pieces.write(stream.state_dict())

    def _read(self, stream: Any, column: str, pieces: _DownloadedShards, said: Callable[[int], None]) -> Iterator[str]:
        rows = iter(stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                pieces.ended = True
                return
            except Exception as error:  # whatever the library and the network below it raise
                raise UnfinishedError(
                    f"{self.source}: ended after {pieces.documents:,} documents: {type(error).__name__}: "
                    f"{describe_cause(error)}; the same command goes on there"
                ) from error
            text = _read_text(row, column, f"{self.source}, row {pieces.documents + 1}")
            if pieces.add(text):
                pieces.write(stream.state_dict())
                said(pieces.documents)
            yield text

    def _open_stream(self) -> Any:
        require_package("datasets", self.source)
        import datasets

        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except (ConnectionError, TimeoutError) as error:
            raise RunError(f"{self.source}: cannot be reached: {describe_cause(error)}") from error
        except Exception as error:  # the library has a class for each way to be wrong, some of them its hub's
            raise UserError(f"{self.source} (--hf-split {self.split}): {describe_cause(error)}") from error


def _read_text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise UserError(f"{where}: no column {column!r}; {format_choices(column, list(row))} (--column)")
    value = row[column]
    if not isinstance(value, str | None):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text (--column)")
    return value or ""


class _DownloadedShards:
    """What was read of a dataset."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.documents = 0
        self.ended = False
        self.state: dict[str, Any] | None = None
        self._number = 0
        self._held: list[bytes] = []
        self._size = 0
        self._since = time.monotonic()
        while (facts := self._path(".json")).is_file():
            found = parse_json(facts.read_text(encoding="utf-8"))
            self.documents, self.ended, self.state = found["documents"], found["ended"], found["state"]
            self._number += 1

    def iter_texts(self) -> Iterator[str]:
        """Of all pieces, in order."""
        for number in range(self._number):
            content = (self._folder / f"{number:06d}.jsonl.zst").read_bytes()
            for line in zstandard.ZstdDecompressor().decompress(content).splitlines():
                yield parse_json(line)

    def add(self, text: str) -> bool:
        """Take a text; returns whether it is time for a piece."""
        self._held.append(json.dumps(text).encode())  # ASCII: a line holds no other kind of line break
        self._size += len(self._held[-1])
        self.documents += 1
        return self._size >= SHARD_BYTES or time.monotonic() - self._since >= SHARD_SECONDS

    def write(self, state: dict[str, Any]) -> None:
        """Keep what was taken, and where the library stands."""
        if not self._held and not self.ended:
            return
        facts = {"documents": self.documents, "ended": self.ended, "state": state}
        write_bytes_atomically(self._path(".jsonl.zst"), zstandard.ZstdCompressor().compress(b"\n".join(self._held)))
        write_bytes_atomically(self._path(".json"), json.dumps(facts).encode())
        self._number += 1
        self._held, self._size, self._since = [], 0, time.monotonic()

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._number:06d}{suffix}"
