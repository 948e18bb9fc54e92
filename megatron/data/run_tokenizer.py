"""A run's own copy of its tokenizer, so that its models read and write text wherever the run's folder goes.

    RUN/tokenizer/description.json    type, name, vocabulary, end of document, files and their checksum
    RUN/tokenizer/tokenizer.json      the files, under the names that a corpus folder has for them

The copy is written when a run takes its folder over, and when a model is imported. Runs from before there were copies
get theirs when they are resumed; until then the tokenizer of their data is taken.
"""

import contextlib
from pathlib import Path

from megatron.data.description import TOKENIZER_FILE, TOKENIZER_FILES, read_tokenizer_folder
from megatron.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, tokenizer_from_config
from megatron.options.data import DataOptions
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors
from megatron.utils.errors import FarfieldError, UserError

TOKENIZER_FOLDER = "tokenizer"
_OWNER_FILE = {TOKENIZER_FILE, *(name for names in TOKENIZER_FILES.values() for name in names)}


def save_tokenizer(tokenizer: Tokenizer, run: str | Path) -> Path:
    """Write a run's copy of its tokenizer, whole or not at all; one that is there already and is right stays.

    Returns:
        The copy's folder.

    Raises:
        UserError: there is a folder of that name which is something else; it stays as it is.
        RunError: the disk refuses.
    """
    folder = Path(run) / TOKENIZER_FOLDER
    with contextlib.suppress(FarfieldError):
        if (folder / TOKENIZER_FILE).is_file() and _is_same_tokenizer(load_tokenizer(folder), tokenizer, folder):
            return folder
    with describe_write_errors(folder):
        there = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if there - _OWNER_FILE or (there and TOKENIZER_FILE not in there):
            raise UserError(f"{folder}: is not a run's copy of its tokenizer, which belongs there; move it away")
        with atomic_directory(folder.resolve()) as new:
            tokenizer.copy_files(new)
            (new / TOKENIZER_FILE).write_text(tokenizer.describe.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return folder


def _is_same_tokenizer(copy: Tokenizer, tokenizer: Tokenizer, folder: Path) -> bool:
    """Is a copy of this tokenizer? One from before copies said what begins a text stays: nothing did then."""
    said = read_tokenizer_folder(folder).facts
    return copy.checksum == tokenizer.checksum and (
        copy.describe == tokenizer.describe or "bos" not in said.model_fields_set
    )


def load_run_tokenizer(run: str | Path | None, data: DataOptions, name: str | None) -> Tokenizer:
    """The tokenizer that a run was trained with: its copy, else that of its data, else `bytes` where it was that.

    Args:
        run: the run's folder; None before there is one.
        data: of its configuration, with paths as they are found from here.
        name: of the tokenizer, as its checkpoint has it; None if that is not known.

    Raises:
        UserError: there is none, also because the run learned a task, or it is another than `name`.
        RunError: its files changed since they were described.
    """
    if run is not None and (Path(run) / TOKENIZER_FOLDER / TOKENIZER_FILE).is_file():
        copy = load_tokenizer(Path(run) / TOKENIZER_FOLDER)
        if name in (None, copy.name):
            return copy  # else the run began anew with another, and this checkpoint is from before
    whose = "the run" if run is None else str(run)
    if data.task is not None:
        raise UserError(f"{whose} was trained on the task {data.task}: it has no tokenizer, and knows no text")
    try:
        found = _load_data_tokenizer(data)
    except UserError as error:
        if name == ByteTokenizer.type:
            return ByteTokenizer()
        raise UserError(f"{whose} has no copy of its tokenizer, and its data do not help: {error}") from None
    if name not in (None, found.name):
        raise UserError(f"{whose} was trained with tokenizer {name}, and its data have {found.name} now")
    return found


def _load_data_tokenizer(data: DataOptions) -> Tokenizer:
    try:
        return load_tokenizer(data)
    except UserError:
        if data.tokenizer_type is None:
            raise
        return tokenizer_from_config(data)  # whether the data are there or not
