"""Folders that the Hugging Face datasets library saved as Arrow files, and the files of each split.

    save_to_disk of a Dataset        state.json: _data_files, in order, and _split, its name or null
    save_to_disk of a DatasetDict    dataset_dict.json: splits; one folder of the above kind for each
    the library's cache              dataset_info.json: splits; NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow

Such folders also contain cache-….arrow files with results of functions applied to the dataset. Reading all Arrow files
would repeat every text several times and mix the splits. Files are read with pyarrow, without the datasets library.
"""

import re
from pathlib import Path
from typing import Any

from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

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
