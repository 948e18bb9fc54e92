"""Texts of a dataset on Hugging Face's hub, or of a local folder that its library reads, streamed with `datasets`.

What was read is kept in shards beside the state of the library, so that a text is fetched once: later passes read the
shards, and a reading that was interrupted goes on behind the last one.

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

HUB_PREFIX = "hf:"
SHARD_BYTES = 1 << 24
SHARD_SECONDS = 30.0
"""A shard is written when there is so much text for it, or after so long."""


DownloadCallback = Callable[[int], None]
"""Called now and then with the number of documents that were read of the hub."""


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
        return self.source.removeprefix(HUB_PREFIX).partition(":")[0]

    @property
    def config(self) -> str | None:
        """Which of a dataset's configurations; None for its only one."""
        return self.source.removeprefix(HUB_PREFIX).partition(":")[2] or None

    @property
    def files(self) -> list[Path]:
        """Of a folder; none of what lies on the hub."""
        folder = Path(self.name)
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []

    def iter_texts(
        self, column: str, download_folder: Path, on_download: DownloadCallback = lambda documents: None
    ) -> Iterator[str]:
        """The text of every row, empty where there is none.

        Args:
            column: that holds the text.
            download_folder: a folder for what was read; what is there is not fetched again.
            on_download: called with the number of documents whenever some are kept.

        Raises:
            UserError: there is no such dataset, configuration, split, or column of text; datasets is not installed.
            UnfinishedError: it cannot be reached any more; what was read is kept.
        """
        shards = _DownloadedShards(download_folder)
        yield from shards.iter_texts()
        if shards.ended:
            return
        stream = self._open_stream()
        if shards.state is not None:
            stream.load_state_dict(shards.state)
        try:
            yield from self._iter_stream(stream, column, shards, on_download)
        finally:  # also where the reader has enough
            shards.write(stream.state_dict())

    def _iter_stream(
        self, stream: Any, column: str, shards: _DownloadedShards, on_download: DownloadCallback
    ) -> Iterator[str]:
        rows = iter(stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                shards.ended = True
                return
            except Exception as error:  # whatever the library and the network below it raise
                raise UnfinishedError(
                    f"{self.source}: ended after {shards.documents:,} documents: {type(error).__name__}: "
                    f"{describe_cause(error)}; the same command goes on there"
                ) from error
            text = _read_text(row, column, f"{self.source}, row {shards.documents + 1}")
            if shards.add(text):
                shards.write(stream.state_dict())
                on_download(shards.documents)
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
        self._num_shards = 0
        self._pending: list[bytes] = []
        self._size = 0
        self._last_write = time.monotonic()
        while (path := self._path(".json")).is_file():
            position = parse_json(path.read_text(encoding="utf-8"))
            self.documents, self.ended, self.state = position["documents"], position["ended"], position["state"]
            self._num_shards += 1

    def iter_texts(self) -> Iterator[str]:
        """Of all shards, in order."""
        for number in range(self._num_shards):
            content = (self._folder / f"{number:06d}.jsonl.zst").read_bytes()
            for line in zstandard.ZstdDecompressor().decompress(content).splitlines():
                yield parse_json(line)

    def add(self, text: str) -> bool:
        """Take a text; returns whether it is time for a shard."""
        self._pending.append(json.dumps(text).encode())  # ASCII: a line holds no other kind of line break
        self._size += len(self._pending[-1])
        self.documents += 1
        return self._size >= SHARD_BYTES or time.monotonic() - self._last_write >= SHARD_SECONDS

    def write(self, state: dict[str, Any]) -> None:
        """Write the texts that were added as a shard, and the state of the library."""
        if not self._pending and not self.ended:
            return
        position = {"documents": self.documents, "ended": self.ended, "state": state}
        write_bytes_atomically(self._path(".jsonl.zst"), zstandard.ZstdCompressor().compress(b"\n".join(self._pending)))
        write_bytes_atomically(self._path(".json"), json.dumps(position).encode())
        self._num_shards += 1
        self._pending, self._size, self._last_write = [], 0, time.monotonic()

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._num_shards:06d}{suffix}"
