"""Loaders of the tokenizer and vocabulary of a corpus, a configuration's data or a run, and checks of token ids.

Each run has its own copy of its tokenizer, so that its models can process text wherever the run's folder is moved:

    RUN/tokenizer/description.json    type, name, vocabulary, end of document, files and their checksum
    RUN/tokenizer/tokenizer.json      the tokenizer's files, named as in a corpus folder

The copy is written when training creates or resumes a run, and when a model is imported. Older runs without a copy get
one when they are resumed; until then, the tokenizer of their data is used.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.data.blend import list_all_prefixes
from megatron.data.corpus_metadata import MAX_CHECKSUM_BYTES, TOKENIZER_FILE, TOKENIZER_FILES, read_tokenizer_folder
from megatron.data.indexed_dataset import SAMPLED_TOKENS, IndexedTokens, check_dataset_content, find_corpus_metadata
from megatron.data.tasks.task_config import read_task_config
from megatron.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer_from_files
from megatron.options.data import DataOptions
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors, read_folder_version
from megatron.utils.errors import FarfieldError, RunError, UserError

TOKENIZER_FOLDER = "tokenizer"
_FILE_NAMES = {TOKENIZER_FILE, *(name for names in TOKENIZER_FILES.values() for name in names)}


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer from a corpus folder or a run's tokenizer folder.

    Raises UserError if there is none, RunError if its files changed since they were described.
    """
    folder = Path(folder)
    described = read_tokenizer_folder(folder)
    metadata = described.metadata
    paths = (folder / name for name in metadata.files)
    tokenizer = load_tokenizer_from_files(metadata.type, *paths, end_token=metadata.end_token, bos=False)
    tokenizer.bos = metadata.bos
    if tokenizer.checksum != metadata.checksum:
        files = ", ".join(metadata.files)
        raise RunError(f"{folder}: {files} changed since {described.written_when}; restore it or {described.advice}")
    for name in ("name", "vocab_size", "eod"):
        stated, actual = getattr(metadata, name), getattr(tokenizer, name)
        if stated != actual:
            raise RunError(
                f"{described.metadata_file}: tokenizer.{name} is {stated}, but the tokenizer's files give {actual}; "
                f"{described.advice}"
            )
    return tokenizer


def load_data_tokenizer(data: DataOptions) -> Tokenizer:
    """Load the tokenizer of a configuration's data.

    It is read from the corpus.json next to the first dataset that has one, or else from `tokenizer_type` and its files.

    Raises UserError if no tokenizer is found, RunError if its files changed since they were described.
    """
    corpora = [prefix.parent for prefix in list_all_prefixes(data) if find_corpus_metadata(prefix) is not None]
    if corpora:
        return load_tokenizer(corpora[0])
    if data.tokenizer_type is None:
        raise UserError("tokenizer_type: the data have no corpus.json; specify the tokenizer that made them")
    return load_tokenizer_from_config(data)


def load_tokenizer_from_config(data: DataOptions) -> Tokenizer:
    """Load the tokenizer named by the configuration. Raises UserError as `load_tokenizer_from_files` does."""
    assert data.tokenizer_type is not None
    return load_tokenizer_from_files(
        data.tokenizer_type, data.vocab_file, data.merge_file, end_token=data.end_token, bos=data.add_bos
    )


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a run's data; all token ids are in [0, size)."""

    size: int
    name: str
    """Name of the tokenizer or the task."""
    eod: int | None
    """Token that ends documents, or None."""
    bos: int | None = None
    """Token that begins documents, or None."""
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)
    """Tokenizer with this vocabulary, or None for a task."""


def build_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.vocab_size, tokenizer.name, tokenizer.eod, tokenizer.bos, tokenizer)


def read_vocab_size(data: DataOptions) -> int:
    """Return the vocabulary size of a run's data from corpus.json, without loading the tokenizer.

    Without a corpus.json the size comes from `read_vocabulary`. Raises the same errors as that function.
    """
    if data.task is None:
        for prefix in list_all_prefixes(data):
            if (metadata := find_corpus_metadata(prefix)) is not None:
                return metadata.tokenizer.vocab_size
    return read_vocabulary(data).size


def find_vocab_size(data: DataOptions) -> int | None:
    """Return the vocabulary size of a run's data, or None if their tokenizer is not on this machine."""
    try:
        return read_vocab_size(data)
    except FarfieldError:
        return None


def read_vocabulary(data: DataOptions) -> Vocabulary:
    """Return the vocabulary of a run's data: from its task, from corpus.json, or from the tokenizer keys.

    Raises UserError if none of these exist, if datasets were made by different tokenizers, or if `tokenizer_type` and
    its files contradict corpus.json.
    """
    if data.task is not None:
        task_config = read_task_config(data)
        return Vocabulary(task_config.task.vocab_size, f"of task {task_config.name}", None)
    vocabularies: dict[Path, Vocabulary] = {}
    for prefix in list_all_prefixes(data):
        if find_corpus_metadata(prefix) is not None:
            sibling = next((other for other in vocabularies if other.parent == prefix.parent), None)
            if sibling is not None:
                vocabularies[prefix] = vocabularies[sibling]
            else:
                vocabularies[prefix] = build_vocabulary(load_tokenizer(prefix.parent))
    if vocabularies:
        (first, expected), *others = vocabularies.items()
        for prefix, other in others:
            if other.name == expected.name and other.bos != expected.bos:
                raise UserError(
                    f"{prefix}: its documents begin {_describe_bos(other)}, but those of {first} "
                    f"{_describe_bos(expected)}; prepare both with the same add_bos"
                )
            if other != expected:
                raise UserError(f"{prefix}: made by tokenizer {other.name}, but {first} by {expected.name}")
    if data.tokenizer_type is None:
        if not vocabularies:
            raise UserError("tokenizer_type: the data have no corpus.json; specify the tokenizer that made them")
        return expected
    has_files = data.vocab_file is not None or data.merge_file is not None
    if vocabularies and not has_files and data.tokenizer_type == expected.name.split("-")[0]:
        return expected
    tokenizer = load_tokenizer_from_config(data)
    if vocabularies and tokenizer.name != expected.name:
        raise UserError(
            f"tokenizer_type: {tokenizer.name} does not match the data: {first} was made by {expected.name}"
        )
    if vocabularies and data.add_bos is not None and tokenizer.bos != expected.bos:
        raise UserError(f"add_bos: {data.add_bos} does not match the data: {first} begins {_describe_bos(expected)}")
    return expected if vocabularies else build_vocabulary(tokenizer)


def _describe_bos(vocabulary: Vocabulary) -> str:
    return "without a special token" if vocabulary.bos is None else f"with token {vocabulary.bos}"


def save_tokenizer(tokenizer: Tokenizer, run: str | Path) -> Path:
    """Write a run's copy of its tokenizer atomically, unless a valid copy exists.

    Returns:
        Folder of the copy.

    Raises:
        UserError: the folder exists but contains something else; it is left unchanged.
        RunError: the disk cannot be written.
    """
    folder = Path(run) / TOKENIZER_FOLDER
    with contextlib.suppress(FarfieldError):
        if (folder / TOKENIZER_FILE).is_file() and _is_same_tokenizer(load_tokenizer(folder), tokenizer, folder):
            return folder
    with describe_write_errors(folder):
        earlier_version = read_folder_version(folder)
        check_tokenizer_folder(run)
        with atomic_directory(folder.resolve(), replaces=earlier_version) as new:
            tokenizer.copy_files(new)
            (new / TOKENIZER_FILE).write_text(tokenizer.metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return folder


def check_tokenizer_folder(run: str | Path) -> None:
    """Check that a run's tokenizer folder contains only a copy of a tokenizer. Raises UserError."""
    folder = Path(run) / TOKENIZER_FOLDER
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names - _FILE_NAMES or (names and TOKENIZER_FILE not in names):
        raise UserError(f"{folder}: not a copy of the run's tokenizer; move it away")


def _is_same_tokenizer(copy: Tokenizer, tokenizer: Tokenizer, folder: Path) -> bool:
    """Return True if a copy matches the tokenizer.

    A copy that predates `bos` matches too, since no run had one then.
    """
    stored = read_tokenizer_folder(folder).metadata
    return copy.checksum == tokenizer.checksum and (
        copy.metadata == tokenizer.metadata or "bos" not in stored.model_fields_set
    )


def load_run_tokenizer(run: str | Path | None, data: DataOptions, name: str | None) -> Tokenizer:
    """Load the tokenizer that a run was trained with: its copy, else that of its data, else `bytes` if that was used.

    Args:
        run: folder of the run; None if it does not exist yet.
        data: data options of its configuration, with resolved paths.
        name: name of the tokenizer from the checkpoint; None if unknown.

    Raises:
        UserError: there is no tokenizer, for example because the run was trained on a task, or its name is not `name`.
        RunError: its files changed since they were described.
    """
    if run is not None and (Path(run) / TOKENIZER_FOLDER / TOKENIZER_FILE).is_file():
        copy = load_tokenizer(Path(run) / TOKENIZER_FOLDER)
        if name in (None, copy.name):
            return copy  # otherwise the run was restarted with another tokenizer after this checkpoint
    run_name = "the run" if run is None else str(run)
    if data.task is not None:
        raise UserError(f"{run_name} was trained on the task {data.task}: it has no tokenizer and cannot process text")
    try:
        tokenizer = _load_remaining_data_tokenizer(data)
    except UserError as error:
        if name == ByteTokenizer.type:
            return ByteTokenizer()
        raise UserError(
            f"{run_name} has no copy of its tokenizer, and none could be loaded from its data: {error}"
        ) from None
    if name not in (None, tokenizer.name):
        raise UserError(f"{run_name} was trained with tokenizer {name}, but its data now have {tokenizer.name}")
    return tokenizer


def _load_remaining_data_tokenizer(data: DataOptions) -> Tokenizer:
    """Load the tokenizer with `load_data_tokenizer`, or the one named by the configuration if the data are missing."""
    try:
        return load_data_tokenizer(data)
    except UserError:
        if data.tokenizer_type is None:
            raise
        return load_tokenizer_from_config(data)


def check_token_range(name: str, token_range: tuple[int, int], dtype: np.dtype, vocabulary: Vocabulary) -> None:
    """Check that the smallest and the largest token id of a dataset are in its vocabulary.

    megatron-core uses negative ids as markers: it would treat a token -1 as padding and exclude it from the loss.

    Raises:
        UserError: an id is negative or exceeds the vocabulary.
    """
    smallest, largest = token_range
    if smallest < 0:
        limit, narrow = np.iinfo(dtype).max, dtype.itemsize < 4
        cause = f": its tokens are stored as {dtype.name}, where ids above {limit:,} become negative" if narrow else ""
        wide = "uint16 or int32" if vocabulary.size <= 1 << 16 else "int32"
        raise UserError(
            f"{name} has token {smallest}, but ids start at 0{cause}; write the dataset again with {wide} tokens"
        )
    if largest >= vocabulary.size:
        raise UserError(
            f"{name} has token {largest}, but tokenizer {vocabulary.name} has only {vocabulary.size} tokens: the "
            "tokenizer does not match the data"
        )


def check_all_tokens(name: str, dataset: IndexedTokens, vocabulary: Vocabulary) -> None:
    """Check every token of a dataset before its first use: the recorded checksum, if any, then the range.

    Files that exceed the size limit are checked in blocks; training also checks each sample it reads.

    Raises:
        UserError: an id is negative or exceeds the vocabulary.
        RunError: a file changed since the corpus was made.
    """
    check_dataset_content(dataset)
    max_tokens = None if dataset.tokens.nbytes <= MAX_CHECKSUM_BYTES else SAMPLED_TOKENS
    check_token_range(name, dataset.find_token_range(max_tokens), dataset.tokens.dtype, vocabulary)
