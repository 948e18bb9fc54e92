"""`corpus.json`: what a corpus folder says of itself, and whether its files are still what it says.

A description is checked when it is read: types, ranges, names. Everything else in the package may trust it.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from megatron.data.options import TokenizerType
from megatron.errors import RunError, UserError

CORPUS_FILE = "corpus.json"
LARGEST_FILE = 1 << 26
"""Bytes of a corpus.json: one with a hundred thousand sources has fewer."""

CHECKED_WHOLE = 1 << 32
"""Bytes of the largest .bin whose content is compared with its checksum when a run first uses it: about 4 to 8 seconds.
Of a larger one that is left to `prepare`, and a run looks at its size."""

TOKENIZER_FILES: dict[TokenizerType, tuple[str, ...]] = {
    "bytes": (),
    "HFTokenizer": ("tokenizer.json",),
    "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
    "SPMTokenizer": ("tokenizer.model",),
}
"""The names of a tokenizer's files in a corpus folder."""

LARGEST_VOCABULARY = 1 << 24
"""Tokens. The largest vocabularies in use have about a million; what a damaged file says beyond fits no memory."""

SplitName = Literal["train", "valid", "test", "all"]
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_STRICT = ConfigDict(strict=True, frozen=True, protected_namespaces=())  # what a later version adds is passed over


class SplitCounts(BaseModel):
    """The size of a split. `tokens` count the end-of-document tokens; `bytes` are UTF-8 without them."""

    model_config = _STRICT

    documents: Count
    tokens: Count
    bytes: Count


class FileFacts(BaseModel):
    """What a file was when the corpus was made."""

    model_config = _STRICT

    size: Count  # bytes
    sha256: Sha256


class TokenizerFacts(BaseModel):
    """The tokenizer that made a corpus."""

    model_config = _STRICT

    type: TokenizerType
    name: str
    vocab_size: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]
    eod: Count
    files: list[str]
    checksum: Sha256

    @model_validator(mode="after")
    def _fit(self) -> "TokenizerFacts":
        if self.eod >= self.vocab_size:
            raise ValueError(f"eod is {self.eod}; it must be less than vocab_size {self.vocab_size}")
        if tuple(self.files) != TOKENIZER_FILES[self.type]:
            expected = ", ".join(TOKENIZER_FILES[self.type]) or "none"
            raise ValueError(f"files are {self.files}; those of {self.type} are {expected}")
        return self


class Description(BaseModel):
    """The content of a corpus.json."""

    model_config = _STRICT

    farfield: str = ""
    sources: list[Any] = []
    made_from: dict[str, Any]
    tokenizer: TokenizerFacts
    splits: Annotated[dict[SplitName, SplitCounts], Field(min_length=1)]
    notes: list[Any] = []
    files: dict[Annotated[str, Field(pattern=r"^[a-z_.]+$")], FileFacts] | None = None  # not in older corpora

    @field_validator("sources", "notes")
    @classmethod
    def _texts(cls, values: list[Any]) -> list[Any]:
        # Not list[str]: names of files need not be Unicode, and pydantic's text must be.
        if not all(isinstance(value, str) for value in values):
            raise ValueError("it must be a list of texts")
        return values


def read_description(folder: str | Path) -> Description:
    """The content of a corpus folder's corpus.json. UserError if there is none, RunError if it is damaged."""
    path = Path(folder) / CORPUS_FILE
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"it is larger than {LARGEST_FILE:,} bytes")
        return Description.model_validate(json.loads(content.decode("utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; `./deepy.py prepare` makes a corpus folder, which has one") from None
    except ValidationError as error:
        problem = _problem(error)
    except RecursionError:
        problem = "nested too deeply"
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:
        problem = " ".join(str(error).split())
    raise RunError(f"{path}: not a corpus description ({problem}); prepare the corpus again")


def _problem(error: ValidationError) -> str:
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


def file_facts(path: Path) -> FileFacts:
    """Size and checksum of a file as it is now."""
    return FileFacts(size=path.stat().st_size, sha256=_sha256(path))


def check_files(folder: Path, described: Description, names: Iterable[str], *, content: bool) -> None:
    """Compare files of a corpus with what its description recorded: sizes, and with `content` their checksums.

    A content is read once by a process, again only if size or time of the file change. Older corpora, of which no
    checksums were recorded, pass. Raises RunError that names the file.
    """
    for name in names:
        path = folder / name
        then = (described.files or {}).get(name)
        if then is None:
            if described.files is not None:
                raise RunError(f"{folder / CORPUS_FILE}: files lacks {name}; prepare the corpus again")
            continue
        try:
            now = path.stat()
            changed = now.st_size != then.size
            how = f"has {now.st_size} bytes, and had {then.size} when the corpus was made"
            if content and not changed:
                changed = _sha256_once(path, now.st_size, now.st_mtime_ns) != then.sha256
                how = "is not what it was when the corpus was made: its checksum is another"
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from None
        if changed:
            raise RunError(f"{path}: {how}; restore it or prepare the corpus again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _sha256_once(path: Path, size: int, modified: int) -> str:
    return _sha256(path)


assert tuple(TOKENIZER_FILES) == get_args(TokenizerType)
