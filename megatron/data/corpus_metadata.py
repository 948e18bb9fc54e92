"""`corpus.json`: what a corpus folder says of itself, and whether its files are still what it says.

A tokenizer that is kept alone, as each run keeps its own, is described by `description.json`.

A description is checked when it is read: types, ranges, names. Everything else in the package may trust it.
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

CORPUS_FILE, TOKENIZER_FILE = "corpus.json", "description.json"
MAX_JSON_BYTES = 1 << 26
"""Bytes of a description: a corpus.json with a hundred thousand sources has fewer."""

MAX_CHECKSUM_BYTES = 1 << 32
"""Bytes of the largest .bin whose content is compared with its checksum when a run first uses it: about 4 to 8 seconds.
Of a larger one that is left to `prepare`, and a run looks at its size."""

TOKENIZER_FILES: dict[TokenizerType, tuple[str, ...]] = {
    "bytes": (),
    "HFTokenizer": ("tokenizer.json",),
    "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
    "SPMTokenizer": ("tokenizer.model",),
}
"""The names of a tokenizer's files in a corpus folder."""

PREPARE_AGAIN = "prepare the corpus again"
_USE_DATA_TOKENIZER = "delete the folder, and the tokenizer of the run's data is taken"

SplitName = Literal["train", "valid", "test", "all"]
ALL_SPLITS: Literal["all"] = "all"
"""The one split of a corpus that is not divided."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_STRICT_CONFIG = ConfigDict(
    strict=True, frozen=True, protected_namespaces=()
)  # what a later version adds is passed over


MetadataT = TypeVar("MetadataT", bound=BaseModel)


class SplitCounts(BaseModel):
    """The size of a split. `tokens` count the end-of-document tokens; `bytes` are UTF-8 without them."""

    model_config = _STRICT_CONFIG

    documents: NonNegativeInt
    tokens: NonNegativeInt
    bytes: NonNegativeInt


class FileDigest(BaseModel):
    """What a file was when the corpus was made."""

    model_config = _STRICT_CONFIG

    size: NonNegativeInt  # bytes
    sha256: Sha256


class TokenizerMetadata(BaseModel):
    """The tokenizer that made a corpus, or that a run was trained with."""

    model_config = _STRICT_CONFIG

    type: TokenizerType
    name: str
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    eod: NonNegativeInt
    files: list[str]
    checksum: Sha256
    bos: NonNegativeInt | None = None  # not in older ones, which had none
    end_token: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> "TokenizerMetadata":
        if self.eod >= self.vocab_size:
            raise ValueError(f"eod is {self.eod}; it must be less than vocab_size {self.vocab_size}")
        if self.bos is not None and self.bos >= self.vocab_size:
            raise ValueError(f"bos is {self.bos}; it must be less than vocab_size {self.vocab_size}")
        if tuple(self.files) != TOKENIZER_FILES[self.type]:
            expected = ", ".join(TOKENIZER_FILES[self.type]) or "none"
            raise ValueError(f"files are {self.files}; those of {self.type} are {expected}")
        return self


class CorpusMetadata(BaseModel):
    """The content of a corpus.json."""

    model_config = _STRICT_CONFIG

    farfield: str = ""
    sources: list[Any] = []
    made_from: dict[str, Any]
    tokenizer: TokenizerMetadata
    splits: Annotated[dict[SplitName, SplitCounts], Field(min_length=1)]
    bad_documents: NonNegativeInt = 0  # left out, as they cannot be decoded (skip_bad)
    notes: list[Any] = []
    files: dict[Annotated[str, Field(pattern=r"^[a-z_.]+$")], FileDigest] | None = None  # not in older corpora

    @field_validator("sources", "notes")
    @classmethod
    def _texts(cls, values: list[Any]) -> list[Any]:
        # Not list[str]: names of files need not be Unicode, and pydantic's text must be.
        if not all(isinstance(value, str) for value in values):
            raise ValueError("it must be a list of texts")
        return values


@dataclass(frozen=True)
class CorpusInfo:
    """What a corpus folder holds."""

    folder: Path
    tokenizer: str  # its name, which tells tokenizers apart
    vocab_size: int
    eod: int
    splits: dict[str, SplitCounts]  # "train", "valid", "test", or "all" alone
    sources: list[str]
    notes: list[str]  # what a person should know: files left out, a vocabulary smaller than asked for
    reused: bool = False  # it was there already

    def prefix(self, split: str) -> Path:
        """The dataset of a split, as `train_data_paths` and the like name it."""
        return self.folder / split_basename(split)


@dataclass(frozen=True)
class TokenizerFolder:
    """A folder that holds a tokenizer's files, and the description of them there."""

    metadata: TokenizerMetadata
    metadata_file: Path
    written_when: str  # when the description was written, as a clause
    advice: str  # if the files have changed since


def read_corpus_metadata(folder: str | Path) -> CorpusMetadata:
    """The content of a corpus folder's corpus.json. UserError if there is none, RunError if it is damaged."""
    return _read_metadata(Path(folder) / CORPUS_FILE, CorpusMetadata, "a corpus description", PREPARE_AGAIN)


def read_corpus(folder: str | Path) -> CorpusInfo:
    """The description of a corpus folder. UserError if it is none, RunError if its description is damaged."""
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


def split_basename(split: str) -> str:
    """The file name, without ending, of a split of a corpus: `train_text_document`, or `text_document` for all."""
    return "text_document" if split == ALL_SPLITS else f"{split}_text_document"


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """The description of the tokenizer in a folder: of a tokenizer alone, or else of a corpus. Errors as above."""
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
            raise ValueError(f"it is larger than {MAX_JSON_BYTES:,} bytes")
        return model.model_validate(parse_json(content.decode("utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; `./deepy.py prepare` makes a corpus folder, which has one") from None
    except ValidationError as error:
        problem = _describe_problem(error)
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:
        problem = " ".join(str(error).split())
    raise RunError(f"{path}: not {description} ({problem}); {advice}")


def _describe_problem(error: ValidationError) -> str:
    """The first of pydantic's problems in a line: `tokenizer.vocab_size is 'many'; it must be a valid integer`."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] == "missing":
        return f"{name} is missing"
    message = first["msg"].replace("Input should be", "it must be").replace("String should", "it must")
    if first["type"] == "value_error":
        return f"{name}: {message.removeprefix('Value error, ')}"
    shown = repr(first["input"])
    return f"{name} is {shown if len(shown) <= 60 else shown[:60] + ' …'}; {message[0].lower()}{message[1:]}"


def compute_file_digest(path: Path) -> FileDigest:
    """Size and checksum of a file as it is now."""
    return FileDigest(size=path.stat().st_size, sha256=_sha256(path))


def check_files(folder: Path, metadata: CorpusMetadata, names: Iterable[str], *, content: bool) -> None:
    """Compare files of a corpus with what its description recorded: sizes, and with `content` their checksums.

    A content is read once by a process, again only if size or time of the file change. Older corpora, of which no
    checksums were recorded, pass. Raises RunError that names the file.
    """
    for name in names:
        path = folder / name
        recorded = (metadata.files or {}).get(name)
        if recorded is None:
            if metadata.files is not None:
                raise RunError(f"{folder / CORPUS_FILE}: files lacks {name}; {PREPARE_AGAIN}")
            continue
        try:
            stat = path.stat()
            changed = stat.st_size != recorded.size
            problem = f"has {stat.st_size} bytes, and had {recorded.size} when the corpus was made"
            if content and not changed:
                changed = _cached_sha256(path, stat.st_size, stat.st_mtime_ns) != recorded.sha256
                problem = "is not what it was when the corpus was made: its checksum is another"
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from None
        if changed:
            raise RunError(f"{path}: {problem}; restore it or {PREPARE_AGAIN}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _cached_sha256(path: Path, size: int, modified: int) -> str:
    return _sha256(path)


assert tuple(TOKENIZER_FILES) == get_args(TokenizerType)
