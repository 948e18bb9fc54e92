"""Readers for files with many documents: plain or compressed lines, and text columns of Parquet and Arrow files.

All readers stream, so files of any size need little memory. Arrow files may have a footer (as written by Feather and
Arrow) or be streams (as written by Hugging Face datasets). Table formats need pyarrow.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.utils.errors import UserError, describe_cause
from megatron.utils.formatting import format_choices
from megatron.utils.imports import require_package

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_SUFFIXES = (".parquet", ".arrow")
BLOCK_BYTES = 1 << 20
"""Bytes read at a time from a file of lines."""

MAX_LINE_BYTES = 1 << 30
"""Maximum size of a JSON document in bytes. A longer line means a damaged file or a decompression bomb."""

ROWS_PER_BATCH = 1024
"""Rows read at a time from a Parquet file. Arrow files are memory-mapped and read in their own batches."""


def iter_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a plain or compressed file, with the current position in the file on disk, in bytes."""
    line_parts: list[bytes] = []
    position = size = 0
    number = 1
    for block, position in _iter_blocks(path):
        first, *others = block.split(b"\n")
        line_parts.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            raise UserError(
                f"{path}:{number}: line is longer than {MAX_LINE_BYTES:,} bytes; write one document per line"
            )
        if others:
            number, size = number + len(others), len(others[-1])
            yield b"".join(line_parts), position
            for line in others[:-1]:
                yield line, position
            line_parts = [others[-1]]
    if last := b"".join(line_parts):
        yield last, position


def _iter_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed content in blocks. Raises UserError if the file is damaged or truncated."""
    try:
        with open(path, "rb") as file:
            if path.name.endswith(".gz"):
                with gzip.open(file) as decompressed:
                    while block := decompressed.read(BLOCK_BYTES):
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
    # The library's stream reader accepts a truncated file; the decompression object detects the end of a frame.
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
        raise UserError(f"{path}: broken zstandard file: file ends in the middle of a frame")


def count_rows(path: Path) -> int:
    """Return the number of rows of a file. Raises UserError if it is damaged."""
    with _open_table(path) as table:
        return (
            table.num_rows if table.num_rows is not None else sum(batch.num_rows for batch in table.iter_batches(None))
        )


def iter_table_texts(path: Path, column: str) -> Iterator[bytes]:
    """Yield the undecoded text of each row, or empty bytes for rows without text.

    Raises UserError, naming the file, if the file is damaged or has no text column of this name.
    """
    import pyarrow as pa

    with _open_table(path) as table:
        names = table.schema.names
        if column not in names:
            raise UserError(f"{path}: no column {column!r}; {format_choices(column, names)} (--column)")
        if not _is_text_type(table.schema.field(column).type):
            raise UserError(
                f"{path}: column {column!r} has type {table.schema.field(column).type}; it must be text (--column)"
            )
        for batch in table.iter_batches(column):
            for value in batch.column(column).cast(pa.large_string()).cast(pa.large_binary()):
                yield value.as_py() or b""


def _is_text_type(column_type: pa.DataType) -> bool:
    from pyarrow import types

    value_type = column_type.value_type if types.is_dictionary(column_type) else column_type
    return types.is_string(value_type) or types.is_large_string(value_type) or types.is_string_view(value_type)


@dataclass(frozen=True)
class _Table:
    """Open table, in Parquet or Arrow format."""

    schema: pa.Schema
    num_rows: int | None  # None if unknown before reading
    iter_batches: Callable[[str | None], Iterator[pa.RecordBatch]]  # for one column, or all if None


@contextlib.contextmanager
def _open_table(path: Path) -> Iterator[_Table]:
    """Open a table. Errors raised before it is closed become UserError."""
    require_package("pyarrow", str(path))
    import pyarrow as pa

    try:
        if path.name.endswith(".parquet"):
            with _open_parquet(path) as table:
                yield table
        else:
            with pa.memory_map(str(path)) as source:
                yield _open_arrow(source)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: broken {path.suffix[1:]} file: {describe_cause(error)}") from None


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[_Table]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield _Table(
            file.schema_arrow,
            file.metadata.num_rows,
            lambda column: file.iter_batches(batch_size=ROWS_PER_BATCH, columns=None if column is None else [column]),
        )


def _open_arrow(source: Any) -> _Table:
    import pyarrow as pa

    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return _Table(stream.schema, None, lambda column: iter(stream))
    return _Table(file.schema, None, lambda column: (file.get_batch(i) for i in range(file.num_record_batches)))
