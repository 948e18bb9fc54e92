"""Streaming text from a Hugging Face hub dataset, or from a local folder that the `datasets` library can read.

Texts are cached in shards together with the library's state, so that each text is downloaded once. Later passes read
the shards, and an interrupted download resumes after the last shard.

    000000.jsonl.zst   texts, one JSON string per line
    000000.json        documents so far, the library's state, and whether the dataset ends here

No code from the dataset is executed, and only the dataset named by the user is requested from the network. Requires the
package datasets.
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
from megatron.utils.formatting import format_choices
from megatron.utils.imports import require_package

HUB_PREFIX = "hf:"
SHARD_BYTES = 1 << 24
SHARD_SECONDS = 30.0
"""Maximum time between shards, in seconds. A shard is also written when SHARD_BYTES of text are pending."""


DownloadCallback = Callable[[int], None]
"""Callback that receives the number of documents downloaded so far."""


class UnfinishedError(RunError):
    """Interrupted work that the same command resumes."""


@dataclass(frozen=True)
class HubDataset:
    """Split of a hub dataset, used as a text source."""

    source: str  # as given: hf:NAME or hf:NAME:CONFIG
    split: str

    @property
    def name(self) -> str:
        """Name of the dataset, or path of a local folder."""
        return self.source.removeprefix(HUB_PREFIX).partition(":")[0]

    @property
    def config(self) -> str | None:
        """Configuration of the dataset, or None for the default."""
        return self.source.removeprefix(HUB_PREFIX).partition(":")[2] or None

    @property
    def files(self) -> list[Path]:
        """Files of a local folder; empty for a dataset on the hub."""
        folder = Path(self.name)
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []

    def iter_texts(
        self, column: str, download_folder: Path, on_download: DownloadCallback = lambda documents: None
    ) -> Iterator[str]:
        """Yield the text of each row, or an empty string for rows without text.

        Args:
            column: name of the text column.
            download_folder: cache folder; cached texts are not downloaded again.
            on_download: called with the number of documents after each shard is written.

        Raises:
            UserError: the dataset, configuration, split or text column does not exist, or datasets is not installed.
            UnfinishedError: the connection failed; the texts read so far are cached.
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
        finally:  # also runs if the consumer stops early
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
            except Exception as error:  # any exception from the library or the network
                raise UnfinishedError(
                    f"{self.source}: stopped after {shards.documents:,} documents: {type(error).__name__}: "
                    f"{describe_cause(error)}; run the same command to resume"
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
        except Exception as error:  # the library and its hub client raise many classes
            raise UserError(f"{self.source} (--hf-split {self.split}): {describe_cause(error)}") from error


def _read_text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise UserError(f"{where}: no column {column!r}; {format_choices(column, list(row))} (--column)")
    value = row[column]
    if not isinstance(value, str | None):
        raise UserError(f"{where}: column {column!r} has type {type(value).__name__}, not text (--column)")
    return value or ""


class _DownloadedShards:
    """Texts of a dataset that are cached on disk."""

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
        """Yield the texts of all shards, in order."""
        for number in range(self._num_shards):
            content = (self._folder / f"{number:06d}.jsonl.zst").read_bytes()
            for line in zstandard.ZstdDecompressor().decompress(content).splitlines():
                yield parse_json(line)

    def add(self, text: str) -> bool:
        """Add a text and return True if a shard should be written now."""
        self._pending.append(json.dumps(text).encode())  # ASCII: no other kind of line break within a line
        self._size += len(self._pending[-1])
        self.documents += 1
        return self._size >= SHARD_BYTES or time.monotonic() - self._last_write >= SHARD_SECONDS

    def write(self, state: dict[str, Any]) -> None:
        """Write the pending texts as a shard, together with the library's state."""
        if not self._pending and not self.ended:
            return
        position = {"documents": self.documents, "ended": self.ended, "state": state}
        write_bytes_atomically(self._path(".jsonl.zst"), zstandard.ZstdCompressor().compress(b"\n".join(self._pending)))
        write_bytes_atomically(self._path(".json"), json.dumps(position).encode())
        self._num_shards += 1
        self._pending, self._size, self._last_write = [], 0, time.monotonic()

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._num_shards:06d}{suffix}"
