"""Where text comes from: files, folders, JSON lines, tables, and the Python interpreter's own library.

A source is written as one word on the command line:

- `python`: the interpreter's standard library without its tests, about 12.6 MB of real Python that every machine
  has; with `packages`, also all installed packages. (A folder of that name is `./python`.)
- a `.txt` file: one document;
- a `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file: one document per line, an object's `text`;
- a `.parquet` or `.arrow` file: one document per row, the text in its column `text`;
- `hf:NAME` or `hf:NAME:CONFIG`: a dataset on Hugging Face's hub, or of a folder that its library reads (`hub.py`);
- a folder: every file below it that has one of the suffixes, hidden ones excepted, in a fixed order.

Reading happens in two places. `scan` and `iter_raw_documents` run in the parent process and touch only names, sizes and
undecoded bytes; `decode` turns one raw document into text and runs in the workers. So decompression is sequential,
as the formats demand, while decoding and tokenizing use all cores.
"""

import gzip
import hashlib
import io
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from megatron.data.hub import PREFIX, HubDataset
from megatron.data.tables import TABLE_SUFFIXES, count_rows, iter_texts
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import UserError
from megatron.utils.imports import require_package

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (".txt", *JSON_LINES, *TABLE_SUFFIXES)
BLOCK_BYTES = 1 << 20  # bytes read at a time
MAX_LINE_BYTES = 1 << 30
"""Bytes of a document in JSON. What is longer is a damaged file, or one that was compressed to fill a memory."""

SourceFormat = Literal["text", "json", "python", "table", "hub"]


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name` is independent of where the source lies on this machine: splits depend on it."""

    path: Path
    name: str
    format: SourceFormat
    size: int  # bytes on disk
    modified: int  # nanoseconds
    hub: HubDataset | None = None  # where it comes from, if that is no file


@dataclass(frozen=True)
class RawDocument:
    """One document before decoding: bytes, or the path of a file that is read where it is decoded."""

    name: str
    where: str  # file, or file:line, for messages
    format: SourceFormat
    content: bytes | Path
    size: int  # bytes of the source that it stands for, for progress
    first_line: int = 1  # its line and offset (bytes) in the file, if it is a part of a text file
    offset: int = 0


def scan_sources(
    sources: Sequence[str], *, packages: bool = False, suffixes: Sequence[str] | None = None, hf_split: str = "train"
) -> list[SourceFile]:
    """All files of the sources, in a fixed order. UserError if a source is missing, unreadable, or has no such file."""
    if not sources:
        raise UserError("sources: none given; name files, folders or `python`")
    suffixes = _normalize_suffixes(suffixes)
    files: list[SourceFile] = []
    for source in sources:
        if source == "python":
            files += _list_library_files(packages)
        elif source.startswith(PREFIX):
            files.append(_list_hub_files(HubDataset(source, hf_split)))
        elif (path := Path(source)).is_dir():
            files += _list_folder(path, suffixes)
        elif path.is_file():
            if not path.name.endswith(suffixes):
                raise UserError(
                    f"{path}: its suffix is none of {', '.join(suffixes)}; --suffixes {path.suffix or 'SUFFIX'} reads "
                    "such files as text"
                )
            files.append(describe_source_file(path))
        else:
            raise UserError(f"{path}: no such file or folder (a source is a file, a folder or `python`)")
    if packages and "python" not in sources:
        raise UserError("packages: only the source `python` has packages")
    seen: set[Path] = set()
    for file in files:
        real = file.path.resolve()
        if real in seen:
            raise UserError(f"{file.path}: given twice by {', '.join(sources)}")
        seen.add(real)
    return files


ReportFunction = Callable[[int], None]


def list_document_names(
    file: SourceFile,
    key: str = "text",
    download_folder: Path | None = None,
    report: ReportFunction = lambda documents: None,
) -> Generator[str, None, None]:
    """The names of a file's documents, in order, without reading more than needed to number them.

    Arguments as for `iter_raw_documents`.
    """
    if file.format == "hub":
        for document in iter_raw_documents(file, key, download_folder, report):
            yield document.name
    elif file.format == "table":
        for number in range(1, count_rows(file.path) + 1):
            yield f"{file.name}:{number}"
    elif file.format != "json":
        yield file.name
    else:
        for number, (line, _) in enumerate(_iter_lines(file.path), start=1):
            if line.strip():
                yield f"{file.name}:{number}"


def iter_raw_documents(
    file: SourceFile,
    key: str = "text",
    download_folder: Path | None = None,
    report: ReportFunction = lambda documents: None,
) -> Generator[RawDocument, None, None]:
    """A file's documents, undecoded, in the order of `list_document_names`; their sizes add up to the file's.

    key: the column of a table that holds the text.
    download_folder: where what is read of the hub is kept; needed for that alone.
    report: called now and then with the number of documents that were read of the hub.
    """
    if file.hub is not None:
        assert download_folder is not None
        own = download_folder / hashlib.sha256(file.name.encode()).hexdigest()[:12]
        for number, text in enumerate(file.hub.iter_texts(key, own, report), start=1):
            content = text.encode()
            where = f"{file.path}, row {number}"
            yield RawDocument(f"{file.name}:{number}", where, "table", content, len(content))
        return
    if file.format == "table":
        rows, before = count_rows(file.path), 0
        for number, text in enumerate(iter_texts(file.path, key), start=1):
            name, where, until = f"{file.name}:{number}", f"{file.path}: row {number}", file.size * number // rows
            yield RawDocument(name, where, "table", text.encode(), until - before)
            before = until
        return
    if file.format != "json":
        yield RawDocument(file.name, str(file.path), file.format, file.path, file.size)
        return
    before = 0
    for number, (line, position) in enumerate(_iter_lines(file.path), start=1):
        if line.strip():
            name, where = f"{file.name}:{number}", f"{file.path}:{number}"
            yield RawDocument(name, where, "json", line, position - before)
            before = position


def decode_document(document: RawDocument, jsonl_key: str = "text") -> str | None:
    """The text of a document; None for a Python file that Python itself cannot decode.

    Raises UserError, naming file and line or byte, for bytes that are not UTF-8, a line that is not a JSON object with
    a text under `jsonl_key`, and text that cannot be written as UTF-8 (a lone surrogate).
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
        return content.decode()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + len(content) - len(error.object)  # Python counts from after a byte order mark
        line = document.first_line + content[:at].count(b"\n")
        place = document.where if document.format == "json" else f"{document.where}:{line}"
        raise UserError(
            f"{place}: not UTF-8: byte 0x{content[at]:02x} at offset {document.offset + at} ({error.reason})"
        ) from None
    return text if document.format == "text" else _read_json_text(text, document.where, jsonl_key)


def limit_source(file: SourceFile, shares: Sequence[float]) -> list[bytes]:
    """A lone text file cut into consecutive parts of about the given shares (they add up to 1), at line ends."""
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror}") from None
    edges, reached = [0], 0.0
    for i, share in enumerate(shares):
        reached += share
        end = content.find(b"\n", max(edges[-1], int(reached * len(content)) - 1)) + 1
        if share == 0:
            end = edges[-1]
        elif end == 0 or not any(shares[i + 1 :]):
            end = len(content)
        edges.append(end)
    return [content[start:end] for start, end in pairwise(edges)]


def _list_hub_files(hub: HubDataset) -> SourceFile:
    """A source on the hub; of a local folder, size and time of its files tell whether it is the same."""
    require_package("datasets", hub.source)
    facts = [path.stat() for path in hub.files]
    name = "/".join(part for part in ("hf", Path(hub.name).name if facts else hub.name, hub.config, hub.split) if part)
    size, modified = sum(each.st_size for each in facts), max((each.st_mtime_ns for each in facts), default=0)
    return SourceFile(Path(hub.source), name, "hub", size, modified, hub)


def _normalize_suffixes(suffixes: Sequence[str] | None) -> tuple[str, ...]:
    if suffixes is None:
        return SUFFIXES
    if not suffixes:
        raise UserError("suffixes: none given")
    for suffix in suffixes:
        if not suffix.startswith(".") or len(suffix) < 2:
            raise UserError(f"suffixes: {suffix!r} does not start with a dot, as .txt does")
    return tuple(suffixes)


def describe_source_file(path: Path, name: str | None = None, format: SourceFormat | None = None) -> SourceFile:
    """One file by its path, its own name where none is given. UserError if it cannot be read."""
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


def _walk_folder(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below a folder, each folder's sorted by name; hidden ones, `skip` and links to folders are left out."""

    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (path := Path(root, name)).is_file():
                yield path


def _list_folder(folder: Path, suffixes: tuple[str, ...]) -> list[SourceFile]:
    base = folder.resolve().name
    files = [
        describe_source_file(path, f"{base}/{path.relative_to(folder).as_posix()}")
        for path in _walk_folder(folder)
        if path.name.endswith(suffixes)
    ]
    if not files:
        raise UserError(f"{folder}: no file in this folder ends in {', '.join(suffixes)}")
    return files


_NON_SOURCE_FOLDERS = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages"})


def _list_library_files(packages: bool) -> list[SourceFile]:
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    files = _list_python_files(library, "python")
    if not files:
        raise UserError(f"python: {library} has no Python source; this interpreter's library is not installed as files")
    if packages:
        for folder in sorted({Path(paths["purelib"]).resolve(), Path(paths["platlib"]).resolve()}):
            if folder.is_dir():
                files += _list_python_files(folder, "site-packages")
    return files


def _list_python_files(folder: Path, base: str) -> list[SourceFile]:
    return [
        describe_source_file(path, f"{base}/{path.relative_to(folder).as_posix()}", "python")
        for path in _walk_folder(folder, _NON_SOURCE_FOLDERS)
        if path.suffix == ".py"
    ]


def _decode_python(content: bytes) -> str | None:
    """Python source in the encoding it declares (PEP 263)."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


def _read_json_text(line: str, where: str, key: str) -> str:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: a JSON {type(value).__name__}, not an object with the key {key!r}")
    if key not in value:
        raise UserError(f"{where}: no key {key!r}; it has {', '.join(map(repr, value)) or 'no keys'} (--column)")
    text = value[key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} is a {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {key!r} is not Unicode: lone surrogate at character {error.start}") from None
    return text


def _iter_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines of a plain or compressed file, with the position reached in the file on disk (bytes)."""
    rest: list[bytes] = []
    position = size = 0
    number = 1
    for block, position in _iter_blocks(path):
        first, *others = block.split(b"\n")
        rest.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            raise UserError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes; a document has one line")
        if others:
            number, size = number + len(others), len(others[-1])
            yield b"".join(rest), position
            for line in others[:-1]:
                yield line, position
            rest = [others[-1]]
    if last := b"".join(rest):
        yield last, position


def _iter_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Decompressed content block by block. UserError if it is damaged or cut short."""
    try:
        with open(path, "rb") as file:
            if path.name.endswith(".gz"):
                with gzip.open(file) as unzipped:
                    while block := unzipped.read(BLOCK_BYTES):
                        yield block, file.tell()
            elif path.name.endswith(".zst"):
                yield from _iter_zstandard_blocks(file, path)
            else:
                while block := file.read(BLOCK_BYTES):
                    yield block, file.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: broken gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _iter_zstandard_blocks(file: io.BufferedReader, path: Path) -> Iterator[tuple[bytes, int]]:
    # The library's stream reader takes a cut file for a finished one; the object knows where a frame ends.
    import zstandard

    decompressor, frame = zstandard.ZstdDecompressor(), None
    try:
        while block := file.read(BLOCK_BYTES // 8):
            while block:
                frame = frame or decompressor.decompressobj()
                if output := frame.decompress(block):
                    yield output, file.tell()
                block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise UserError(f"{path}: broken zstandard file: {error}") from None
    if frame is not None:
        raise UserError(f"{path}: broken zstandard file: it ends in the middle of a frame")
