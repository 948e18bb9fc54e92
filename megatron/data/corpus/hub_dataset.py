"""Datasets of Hugging Face: streaming text from the hub or a local folder, and folders saved as Arrow files.

Texts are cached in shards together with the library's state, so that each text is downloaded once. Later passes read
the shards, and an interrupted download resumes after the last shard.

    000000.jsonl.zst   texts, one JSON string per line
    000000.json        documents so far, the library's state, and whether the dataset ends here

No code from the dataset is executed, and only the dataset named by the user is requested from the network. Requires the
package datasets.

Saved folders are read with pyarrow, without the datasets library:

    save_to_disk of a Dataset        state.json: _data_files, in order, and _split, its name or null
    save_to_disk of a DatasetDict    dataset_dict.json: splits; one folder of the above kind for each
    the library's cache              dataset_info.json: splits; NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow

Such folders also contain cache-….arrow files with results of functions applied to the dataset. Reading all Arrow files
would repeat every text several times and mix the splits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from megatron.utils.atomic_io import parse_json, write_bytes_atomically
from megatron.utils.errors import RunError, UserError, check_reachable, describe_cause
from megatron.utils.formatting import format_choices, format_quantity
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
                    f"{self.source}: stopped after {format_quantity(shards.documents, 'document')}: "
                    f"{type(error).__name__}: {describe_cause(error)}; run the same command to resume"
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
        raise UserError(f"{where}: column {column!r} has type {type(value).__name__}; it must be text (--column)")
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
        while (path := self._get_path(".json")).is_file():
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
        write_bytes_atomically(
            self._get_path(".jsonl.zst"), zstandard.ZstdCompressor().compress(b"\n".join(self._pending))
        )
        write_bytes_atomically(self._get_path(".json"), json.dumps(position).encode())
        self._num_shards += 1
        self._pending, self._size, self._last_write = [], 0, time.monotonic()

    def _get_path(self, suffix: str) -> Path:
        return self._folder / f"{self._num_shards:06d}{suffix}"


DEFAULT_SPLIT = "train"
_STATE, _DICT, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"
_CACHED_FILE = r"(?!cache-).*?-{split}(-\d{{5}}-of-\d{{5}})?\.arrow"


def is_saved_dataset(folder: Path) -> bool:
    """Return True if the Hugging Face datasets library wrote this folder, whatever its columns contain."""
    if (folder / _DICT).is_file():
        return True
    return (folder / _INFO).is_file() and ((folder / _STATE).is_file() or any(folder.glob("*.arrow")))


def list_saved_files(folder: Path, split: str | None) -> list[Path]:
    """Return the Arrow files of a split of a saved dataset, in row order.

    Args:
        folder: folder for which `is_saved_dataset` returns True.
        split: name of the split; `train` if None. A dataset saved without others has only its own split.

    Raises:
        UserError: the split or its files are missing, or the dataset's description is damaged.
    """
    if (folder / _DICT).is_file():
        splits = _read_json(folder / _DICT, "splits")["splits"]
        return _list_data_files(folder / _choose_split(folder, split, splits))
    if not (folder / _STATE).is_file():
        splits = list(_read_json(folder / _INFO, "splits")["splits"] or ())
        pattern = re.compile(_CACHED_FILE.format(split=re.escape(_choose_split(folder, split, splits))))
        files = sorted(path for path in folder.glob("*.arrow") if pattern.fullmatch(path.name))
        if not files:
            raise UserError(f"{folder}: no .arrow file of the split {split or DEFAULT_SPLIT} (--hf-split)")
        return files
    own_split = _read_json(folder / _STATE, "_data_files").get("_split")
    if split is not None and own_split not in (None, split):
        raise UserError(f"{folder}: is the split {own_split} of a dataset, not {split} (--hf-split)")
    return _list_data_files(folder)


def _choose_split(folder: Path, split: str | None, splits: list[str]) -> str:
    chosen = split or DEFAULT_SPLIT
    if chosen not in splits:
        raise UserError(f"{folder}: no split {chosen!r}; {format_choices(chosen, splits)} (--hf-split)")
    return chosen


def _list_data_files(folder: Path) -> list[Path]:
    state = _read_json(folder / _STATE, "_data_files")
    if state.get("_indices_data_files"):
        raise UserError(f"{folder}: rows are selected by an index (datasets before 2.0); save the dataset again")
    try:
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (TypeError, KeyError):
        raise UserError(f"{folder / _STATE}: _data_files does not list files; save the dataset again") from None
    for path in files:
        if not path.is_file():
            check_reachable(path)
            raise UserError(f"{path}: not found but listed in {_STATE}; save the dataset again")
    return files


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or key not in content:
            raise ValueError(f"{key} is missing")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not written by Hugging Face datasets: {error}") from None
    return content
