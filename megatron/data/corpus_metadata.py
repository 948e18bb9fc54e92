"""Reader and validation of `corpus.json`, the description of a corpus folder.

A tokenizer stored without a corpus, such as the copy in each run, is described by `description.json`.

Types, ranges and names are validated when a description is read, so other modules can rely on them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator, model_validator

from megatron.options.data import MAX_VOCAB_SIZE, TokenizerType
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError
from megatron.utils.field_errors import describe_field_error

CORPUS_FILE, TOKENIZER_FILE = "corpus.json", "description.json"
MAX_JSON_BYTES = 1 << 26
"""Maximum size of a description, in bytes. A corpus.json with 100,000 sources is smaller."""

MAX_CHECKSUM_BYTES = 1 << 32
"""Maximum size of a .bin file, in bytes, whose checksum a run verifies on first use, which takes 4 to 8 seconds.

For larger files a run compares only the size; `prepare` verifies the checksum.
"""

TOKENIZER_FILES: dict[TokenizerType, tuple[str, ...]] = {
    "bytes": (),
    "HFTokenizer": ("tokenizer.json",),
    "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
    "SPMTokenizer": ("tokenizer.model",),
}
"""Names of a tokenizer's files in a corpus folder."""

PREPARE_AGAIN = "prepare the corpus again"
_USE_DATA_TOKENIZER = "delete the folder to use the tokenizer of the run's data"

SplitName = Literal["train", "valid", "test", "all"]
ALL_SPLITS: Literal["all"] = "all"
"""Name of the only split of an undivided corpus."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_STRICT_CONFIG = ConfigDict(
    strict=True, frozen=True, protected_namespaces=()
)  # fields added by later versions are ignored


MetadataT = TypeVar("MetadataT", bound=BaseModel)


class SplitCounts(BaseModel):
    """Size of a split. `tokens` include end-of-document tokens; `bytes` are UTF-8 bytes of the text without them."""

    model_config = _STRICT_CONFIG

    documents: NonNegativeInt
    tokens: NonNegativeInt
    bytes: NonNegativeInt


class FileDigest(BaseModel):
    """Size and checksum of a file when the corpus was made."""

    model_config = _STRICT_CONFIG

    size: NonNegativeInt  # bytes
    sha256: Sha256


class TokenizerMetadata(BaseModel):
    """Description of the tokenizer of a corpus or a run."""

    model_config = _STRICT_CONFIG

    type: TokenizerType
    name: str
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    eod: NonNegativeInt
    files: list[str]
    checksum: Sha256
    bos: NonNegativeInt | None = None  # absent in older descriptions, which had none
    end_token: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> "TokenizerMetadata":
        if self.eod >= self.vocab_size:
            raise ValueError(f"eod is {self.eod}; it must be less than vocab_size {self.vocab_size}")
        if self.bos is not None and self.bos >= self.vocab_size:
            raise ValueError(f"bos is {self.bos}; it must be less than vocab_size {self.vocab_size}")
        if tuple(self.files) != TOKENIZER_FILES[self.type]:
            expected = ", ".join(TOKENIZER_FILES[self.type]) or "none"
            raise ValueError(f"files are {self.files}; for {self.type} they must be {expected}")
        return self


class CorpusMetadata(BaseModel):
    """Content of a corpus.json file."""

    model_config = _STRICT_CONFIG

    farfield: str = ""
    sources: list[Any] = []
    made_from: dict[str, Any]
    tokenizer: TokenizerMetadata
    splits: Annotated[dict[SplitName, SplitCounts], Field(min_length=1)]
    bad_documents: NonNegativeInt = 0  # documents skipped because they cannot be decoded (skip_bad)
    notes: list[Any] = []
    files: dict[Annotated[str, Field(pattern=r"^[a-z_.]+$")], FileDigest] | None = None  # absent in older corpora

    @field_validator("sources", "notes")
    @classmethod
    def _texts(cls, values: list[Any]) -> list[Any]:
        # Not list[str]: file names may not be valid Unicode, which pydantic requires of str.
        if not all(isinstance(value, str) for value in values):
            raise ValueError("it must be a list of strings")
        return values


@dataclass(frozen=True)
class CorpusInfo:
    """Summary of a corpus folder."""

    folder: Path
    tokenizer: str  # name of the tokenizer, which identifies it
    vocab_size: int
    eod: int
    splits: dict[str, SplitCounts]  # "train", "valid", "test", or only "all"
    sources: list[str]
    notes: list[str]  # notes for the user: skipped files, or a vocabulary smaller than requested
    reused: bool = False  # the corpus already existed

    def get_dataset_prefix(self, split: str) -> Path:
        """Return the dataset prefix of a split, as used by `train_data_paths`."""
        return self.folder / get_split_basename(split)


@dataclass(frozen=True)
class TokenizerFolder:
    """Folder that contains a tokenizer's files and their description."""

    metadata: TokenizerMetadata
    metadata_file: Path
    written_when: str  # clause for messages, for example "the corpus was made"
    advice: str  # advice for the user if the files have changed


def read_corpus_metadata(folder: str | Path) -> CorpusMetadata:
    """Return the content of a folder's corpus.json.

    Raises UserError if it is missing or may not be read, RunError if it is damaged.
    """
    return _read_metadata(Path(folder) / CORPUS_FILE, CorpusMetadata, "a corpus description", PREPARE_AGAIN)


def read_corpus(folder: str | Path) -> CorpusInfo:
    """Return a summary of a corpus folder. Raises UserError if it is not a corpus, RunError if it is damaged."""
    folder = Path(folder)
    metadata = read_corpus_metadata(folder)
    return CorpusInfo(
        folder=folder,
        tokenizer=metadata.tokenizer.name,
        vocab_size=metadata.tokenizer.vocab_size,
        eod=metadata.tokenizer.eod,
        splits={str(name): size for name, size in metadata.splits.items()},
        sources=metadata.sources,
        notes=metadata.notes,
    )


def get_split_basename(split: str) -> str:
    """Return the base name of a split's files: `train_text_document`, or `text_document` for an undivided corpus."""
    return "text_document" if split == ALL_SPLITS else f"{split}_text_document"


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """Return the description of the tokenizer in a folder, stored alone or in a corpus.

    Errors as in `read_corpus_metadata`.
    """
    path = folder / TOKENIZER_FILE
    if path.is_file():
        metadata = _read_metadata(path, TokenizerMetadata, "the description of a tokenizer", _USE_DATA_TOKENIZER)
        return TokenizerFolder(metadata, path, "it was written", _USE_DATA_TOKENIZER)
    return TokenizerFolder(
        read_corpus_metadata(folder).tokenizer, folder / CORPUS_FILE, "the corpus was made", PREPARE_AGAIN
    )


def _read_metadata(path: Path, model: type[MetadataT], description: str, advice: str) -> MetadataT:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"file is larger than {MAX_JSON_BYTES:,} bytes")
        return model.model_validate(parse_json(content.decode("utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; `./deepy.py prepare` creates corpus folders with one") from None
    except ValidationError as error:
        problem = describe_field_error(error)
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:
        problem = " ".join(str(error).split())
    raise RunError(f"{path}: not {description} ({problem}); {advice}")


def compute_file_digest(path: Path) -> FileDigest:
    """Return the current size and checksum of a file."""
    return FileDigest(size=path.stat().st_size, sha256=_compute_sha256(path))


def check_files(folder: Path, metadata: CorpusMetadata, names: Iterable[str], *, content: bool) -> None:
    """Compare files of a corpus with their recorded sizes and, with `content`, their checksums.

    A process reads each file's content once, and again only if its size or modification time changes. Older corpora
    without recorded checksums pass. Raises RunError naming the file that differs, UserError if one cannot be read.
    """
    for name in names:
        path = folder / name
        recorded = (metadata.files or {}).get(name)
        if recorded is None:
            if metadata.files is not None:
                raise RunError(f"{folder / CORPUS_FILE}: {name} is not listed in files; {PREPARE_AGAIN}")
            continue
        try:
            stat = path.stat()
            changed = stat.st_size != recorded.size
            problem = f"size is {stat.st_size} bytes, but was {recorded.size} when the corpus was made"
            if content and not changed:
                changed = _compute_cached_sha256(path, stat.st_size, stat.st_mtime_ns) != recorded.sha256
                problem = "changed since the corpus was made (different checksum)"
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if changed:
            raise RunError(f"{path}: {problem}; restore it or {PREPARE_AGAIN}")


def _compute_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _compute_cached_sha256(path: Path, size: int, modified: int) -> str:
    return _compute_sha256(path)


assert tuple(TOKENIZER_FILES) == get_args(TokenizerType)
