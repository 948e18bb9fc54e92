"""Text sources: files, folders, JSON lines, tables, and the Python interpreter's own library.

Each source is one word on the command line:

- `python`: the interpreter's standard library without its tests, about 12.6 MB of Python code that every machine has;
  with `packages`, all installed packages too. Use `./python` for a folder of that name. The text depends on the
  version of Python;
- `shakespeare`: 1.1 MB of Shakespeare's plays in 133 documents, included in this project. The corpus is the same on
  every machine. Use `./shakespeare` for a folder of that name;
- a `.txt` file: one document;
- a `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file: one document per line, the `text` of an object;
- a `.parquet` or `.arrow` file: one document per row, from the column `text`;
- `hf:NAME` or `hf:NAME:CONFIG`: a dataset on the Hugging Face hub, or a folder that its library can read
  (`hub_dataset.py`);
- a folder: all files in it and its subfolders with one of the suffixes, except hidden ones, in a fixed order; for a
  dataset saved by the Hugging Face library, the files of one split (`hub_dataset.py`).

Reading has two stages. `scan_sources` and `iter_raw_documents` run in the parent process and handle only names, sizes
and undecoded bytes. `decode_document` turns one raw document into text and runs in the workers. Decompression is
therefore sequential, as the formats require, while decoding and tokenizing use all cores.
"""

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from megatron.data.corpus.file_readers import TABLE_SUFFIXES, count_rows, iter_lines, iter_table_texts
from megatron.data.corpus.hub_dataset import (
    DEFAULT_SPLIT,
    HUB_PREFIX,
    DownloadCallback,
    HubDataset,
    is_saved_dataset,
    list_saved_files,
)
from megatron.options.data import is_url
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import UserError, check_reachable
from megatron.utils.formatting import suggest_path
from megatron.utils.imports import require_package

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (".txt", *JSON_LINES, *TABLE_SUFFIXES)

BUILT_IN_SOURCES = ("python", "shakespeare")
"""Names of the sources that need no user files."""

SHAKESPEARE = Path(__file__).with_name("texts") / "shakespeare.jsonl.gz"
"""Tiny Shakespeare (from Karpathy's char-rnn; public domain), split into documents.

A document ends at the first blank line after 8,192 characters, so the concatenated documents equal the original text.
"""

SourceFormat = Literal["text", "json", "python", "table", "hub"]


class BadDocumentError(UserError):
    """Error for a document that cannot be decoded: not UTF-8, not JSON, or without text."""


@dataclass(frozen=True)
class SourceFile:
    """File of a source. `name` does not depend on the file's location, because splits are derived from it."""

    path: Path
    name: str
    format: SourceFormat
    size: int  # bytes on disk
    modified: int  # nanoseconds; 0 for a text that this project includes
    hub: HubDataset | None = None  # set if the source is a hub dataset


@dataclass(frozen=True)
class RawDocument:
    """Document before decoding: its bytes, or the path of a file to read when decoding."""

    name: str
    where: str  # file or file:line, used in messages
    format: SourceFormat
    content: bytes | Path
    size: int  # bytes of the source it represents, used for progress
    first_line: int = 1  # line and byte offset in the file, for slices of a text file
    offset: int = 0


def scan_sources(
    sources: Sequence[str],
    *,
    packages: bool = False,
    suffixes: Sequence[str] | None = None,
    hf_split: str | None = None,
    column: str | None = None,
) -> list[SourceFile]:
    """Return all files of the sources, in a fixed order.

    Args:
        sources: sources as given on the command line.
        packages: include all installed packages for the source `python`.
        suffixes: suffixes of files to read from folders; all known suffixes if None.
        hf_split: split of Hugging Face datasets; `train` if None.
        column: column or JSON key that contains the text, if set by the user.

    Raises:
        UserError: a source is missing, unreadable, remote or without matching files, or an option applies to no source.
    """
    if not sources:
        raise UserError("sources: none given; name files, folders, `python` or `shakespeare`")
    has_suffixes, suffixes = suffixes is not None, _normalize_suffixes(suffixes)
    files: list[SourceFile] = []
    has_dataset = False

    def list_dataset(folder: Path) -> list[Path]:
        nonlocal has_dataset
        has_dataset = True
        return list_saved_files(folder, hf_split)

    for source in sources:
        if source == "python":
            files += _list_library_files(packages)
        elif source == "shakespeare":
            # the same text everywhere, but its file is as old as the checkout or the installation
            files.append(replace(describe_source_file(SHAKESPEARE), modified=0))
        elif is_url(source):
            raise UserError(_reject_remote_source(source))
        elif source.startswith(HUB_PREFIX) and not is_saved_dataset(Path(source.removeprefix(HUB_PREFIX))):
            has_dataset = True
            files.append(_describe_hub_dataset(HubDataset(source, hf_split or DEFAULT_SPLIT)))
        elif (path := Path(source.removeprefix(HUB_PREFIX))).is_dir():
            files += _list_folder(path, suffixes, list_dataset)
        elif path.is_file():
            if not path.name.endswith(suffixes):
                known = f"the suffix must be one of {', '.join(suffixes)}"
                if not _is_suffix(path.suffix):
                    raise UserError(f"{path}: it has no suffix; {known}; rename the file, for example to {path}.txt")
                raise UserError(f"{path}: unknown suffix; {known}; --suffixes {path.suffix} reads such files as text")
            files.append(describe_source_file(path))
        else:
            check_reachable(path)
            near = suggest_path(path, keywords=("python", "shakespeare"))
            raise UserError(
                f"{path}: no such file or folder; {near}a source is a file, a folder, hf:NAME, `python` or "
                "`shakespeare`"
            )
    if hf_split is not None and not has_dataset:
        raise UserError(f"hf_split: {hf_split}: no source is a Hugging Face dataset (hf:NAME or saved on disk)")
    if column is not None and all(file.format in ("text", "python") for file in files):
        raise UserError(f"column: {column}: no source has JSON lines or table rows")
    if has_suffixes and all(file.format in ("python", "hub") for file in files):
        raise UserError(f"suffixes: {', '.join(suffixes)}: no source is a folder or a file")
    if packages and "python" not in sources:
        raise UserError("packages: only the source `python` has packages")
    resolved_paths: set[Path] = set()
    for file in files:
        resolved = file.path.resolve()
        if resolved in resolved_paths:
            repeated = next((source for source in sources if sources.count(source) > 1), None)
            raise UserError(
                f"{file.path} is given twice, by {', '.join(sources)}"
                if repeated is None
                else f"{repeated} is given twice"
            )
        resolved_paths.add(resolved)
    return files


def list_document_names(
    file: SourceFile,
    key: str = "text",
    download_folder: Path | None = None,
    on_download: DownloadCallback = lambda documents: None,
) -> Generator[str, None, None]:
    """Yield the names of a file's documents in order, reading only what is needed to number them.

    Takes the arguments of `iter_raw_documents`.
    """
    if file.format == "hub":
        for document in iter_raw_documents(file, key, download_folder, on_download):
            yield document.name
    elif file.format == "table":
        for number in range(1, count_rows(file.path) + 1):
            yield f"{file.name}:{number}"
    elif file.format != "json":
        yield file.name
    else:
        for number, (line, _) in enumerate(iter_lines(file.path), start=1):
            if line.strip():
                yield f"{file.name}:{number}"


def iter_raw_documents(
    file: SourceFile,
    key: str = "text",
    download_folder: Path | None = None,
    on_download: DownloadCallback = lambda documents: None,
) -> Generator[RawDocument, None, None]:
    """Yield a file's undecoded documents in the order of `list_document_names`.

    Their sizes add up to the file's size.

    key: column or JSON key that contains the text. download_folder: cache for hub datasets; required only for those.
    on_download: called periodically with the number of documents downloaded from the hub.
    """
    if file.hub is not None:
        assert download_folder is not None
        folder = download_folder / hashlib.sha256(file.name.encode()).hexdigest()[:12]
        for number, text in enumerate(file.hub.iter_texts(key, folder, on_download), start=1):
            content = text.encode()
            where = f"{file.path}, row {number}"
            yield RawDocument(f"{file.name}:{number}", where, "table", content, len(content))
        return
    if file.format == "table":
        num_rows, before = count_rows(file.path), 0
        for number, content in enumerate(iter_table_texts(file.path, key), start=1):
            name, where, position = (
                f"{file.name}:{number}",
                f"{file.path}: row {number}",
                file.size * number // num_rows,
            )
            yield RawDocument(name, where, "table", content, position - before)
            before = position
        return
    if file.format != "json":
        yield RawDocument(file.name, str(file.path), file.format, file.path, file.size)
        return
    before = 0
    for number, (line, position) in enumerate(iter_lines(file.path), start=1):
        if line.strip():
            name, where = f"{file.name}:{number}", f"{file.path}:{number}"
            yield RawDocument(name, where, "json", line, position - before)
            before = position


def decode_document(document: RawDocument, jsonl_key: str = "text") -> str | None:
    """Return the text of a document, or None for a Python file that Python cannot decode.

    Raises:
        BadDocumentError: the bytes are not UTF-8, a line is not a JSON object with text under `jsonl_key`, or the text
            cannot be encoded as UTF-8 (a lone surrogate). The message gives the file and the line or byte.
        UserError: the file cannot be read.
    """
    content = document.content
    if isinstance(content, Path):
        try:
            content = content.read_bytes()
        except OSError as error:
            raise UserError(f"{document.where}: cannot be read: {error.strerror}") from None
    if document.format == "python":
        return _decode_python(content)
    if document.format == "table":
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise BadDocumentError(f"{document.where}: not UTF-8 at byte {error.start} ({error.reason})") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + len(content) - len(error.object)  # Python counts from after a byte order mark
        line = document.first_line + content[:offset].count(b"\n")
        location = document.where if document.format == "json" else f"{document.where}:{line}"
        raise BadDocumentError(
            f"{location}: not UTF-8: byte 0x{content[offset]:02x} at offset {document.offset + offset} ({error.reason})"
        ) from None
    return text if document.format == "text" else _read_json_text(text, document.where, jsonl_key)


def split_text_file(file: SourceFile, fractions: Sequence[float]) -> list[bytes]:
    """Split a text file at line ends into consecutive slices with about the given fractions, which sum to 1."""
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror}") from None
    edges, cumulative = [0], 0.0
    for i, fraction in enumerate(fractions):
        cumulative += fraction
        end = content.find(b"\n", max(edges[-1], int(cumulative * len(content)) - 1)) + 1
        if fraction == 0:
            end = edges[-1]
        elif end == 0 or not any(fractions[i + 1 :]):
            end = len(content)
        edges.append(end)
    return [content[start:end] for start, end in pairwise(edges)]


def _describe_hub_dataset(hub: HubDataset) -> SourceFile:
    """Describe a hub dataset as a source; size and modification time of a local folder's files identify its content."""
    require_package("datasets", hub.source)
    stats = [path.stat() for path in hub.files]
    name = "/".join(part for part in ("hf", Path(hub.name).name if stats else hub.name, hub.config, hub.split) if part)
    size, modified = sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
    return SourceFile(Path(hub.source), name, "hub", size, modified, hub)


def _reject_remote_source(source: str) -> str:
    """Return the error message for a remote source such as s3://bucket/file, with an alternative."""
    dataset = source.removeprefix("hf://").removeprefix("datasets/")
    instead = f"(for a dataset on the hub, use {HUB_PREFIX}{dataset}) " if source.startswith("hf://") else ""
    return (
        f"{source}: remote sources are not supported: a source is read several times in the same order and identified "
        f"by size and modification time; copy it to a local disk first {instead}and prepare the copy"
    )


def _normalize_suffixes(suffixes: Sequence[str] | None) -> tuple[str, ...]:
    if suffixes is None:
        return SUFFIXES
    if not suffixes:
        raise UserError("suffixes: none given")
    for suffix in suffixes:
        if not _is_suffix(suffix):
            raise UserError(f"suffixes: {suffix!r} must be a dot and at least one more character, for example .txt")
    return tuple(suffixes)


def _is_suffix(text: str) -> bool:
    return text.startswith(".") and len(text) > 1


def describe_source_file(path: Path, name: str | None = None, format: SourceFormat | None = None) -> SourceFile:
    """Describe one file, named by its base name unless `name` is given. Raises UserError if it cannot be read."""
    try:
        stat = path.stat()
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    name = path.name if name is None else name
    if format is None:
        format = "json" if name.endswith(JSON_LINES) else "table" if name.endswith(TABLE_SUFFIXES) else "text"
    return SourceFile(path, name, format, stat.st_size, stat.st_mtime_ns)


def _walk_folder(
    folder: Path,
    skip: frozenset[str] = frozenset(),
    list_dataset: Callable[[Path], list[Path]] | None = None,
) -> Iterator[Path]:
    """Yield the files below a folder, sorted by name within each folder.

    Hidden files and folders, folders named in `skip`, and links to folders are excluded.

    list_dataset: returns the files to read from a saved dataset, in place of all files below its folder.
    """

    def raise_unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None

    for root, folders, names in os.walk(folder, onerror=raise_unreadable):
        if list_dataset is not None and is_saved_dataset(Path(root)):
            folders[:] = []
            yield from list_dataset(Path(root))
            continue
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (path := Path(root, name)).is_file():
                yield path


def _list_folder(
    folder: Path, suffixes: tuple[str, ...], list_dataset: Callable[[Path], list[Path]]
) -> list[SourceFile]:
    base = folder.resolve().name
    files = [
        describe_source_file(path, f"{base}/{path.relative_to(folder).as_posix()}")
        for path in _walk_folder(folder, list_dataset=list_dataset)
        if path.name.endswith(suffixes)
    ]
    if not files:
        raise UserError(f"{folder}: no file in this folder ends in {', '.join(suffixes)}")
    return files


_NON_SOURCE_FOLDERS = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages"})


def _list_library_files(packages: bool) -> list[SourceFile]:
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    names = _name_python_files(library, "python")
    if not names:
        raise UserError(
            f"python: {library} contains no Python source; this interpreter's library is not installed as files"
        )
    if packages:
        for folder in sorted({Path(paths["purelib"]).resolve(), Path(paths["platlib"]).resolve()}):
            if folder.is_dir():
                names |= _name_python_files(folder, "site-packages")
    # Debian's library contains one file twice, through a link; list a link only if its target is not listed.
    listed = {path.resolve() for path in names if not path.is_symlink()}
    files = []
    for path, name in names.items():
        if path.is_symlink() and path.resolve() in listed:
            continue
        listed.add(path.resolve())
        files.append(describe_source_file(path, name, "python"))
    return files


def _name_python_files(folder: Path, base: str) -> dict[Path, str]:
    """Return the Python files below a folder, with their names in a corpus."""
    paths = (path for path in _walk_folder(folder, _NON_SOURCE_FOLDERS) if path.suffix == ".py")
    return {path: f"{base}/{path.relative_to(folder).as_posix()}" for path in paths}


def _decode_python(content: bytes) -> str | None:
    """Decode Python source with its declared encoding (PEP 263), or return None if that fails."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


JSON_TYPES = {
    dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number", bool: "a Boolean",
    type(None): "null",
}  # fmt: skip
"""Names of JSON types for messages, by Python type."""


def _read_json_text(line: str, where: str, key: str) -> str:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise BadDocumentError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadDocumentError(
            f"{where}: JSON value is {JSON_TYPES[type(value)]}; it must be an object with the key {key!r}"
        )
    if key not in value:
        raise BadDocumentError(
            f"{where}: no key {key!r}; available: {', '.join(map(repr, value)) or 'none'} (--column)"
        )
    text = value[key]
    if not isinstance(text, str):
        raise BadDocumentError(f"{where}: {key!r} is {JSON_TYPES[type(text)]}; it must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocumentError(f"{where}: {key!r} is not Unicode: lone surrogate at character {error.start}") from None
    return text
