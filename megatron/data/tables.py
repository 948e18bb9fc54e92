"""Texts in the rows of Parquet and Arrow files, as corpora are published today.

Rows are read some at a time, so that a file of any size needs little memory. An Arrow file may be of either kind, with
a footer (what Feather and Arrow write) or a stream (what Hugging Face's datasets writes). Needs pyarrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.utils.errors import UserError, describe_cause
from megatron.utils.imports import require_package
from megatron.utils.suggestions import format_choices

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_SUFFIXES = (".parquet", ".arrow")
ROWS_PER_BATCH = 1024
"""Of a Parquet file, read at a time; an Arrow file is mapped into memory, and its batches are read as they are."""


def count_rows(path: Path) -> int:
    """How many rows a file has. UserError if it is damaged."""
    with _open_table(path) as table:
        return table.rows if table.rows is not None else sum(batch.num_rows for batch in table.batches(None))


def iter_texts(path: Path, column: str) -> Iterator[str]:
    """The text of each row, empty where there is none.

    Raises UserError, naming file and row, if the file is damaged, or has no such column of text.
    """
    import pyarrow as pa

    with _open_table(path) as table:
        names = table.schema.names
        if column not in names:
            raise UserError(f"{path}: no column {column!r}; {format_choices(column, names)} (--column)")
        if not _is_text_type(table.schema.field(column).type):
            raise UserError(f"{path}: column {column!r} holds {table.schema.field(column).type}, not text (--column)")
        number = 0
        for batch in table.batches(column):
            for value in batch.column(column).cast(pa.large_string()):
                number += 1
                try:
                    yield value.as_py() or ""
                except UnicodeDecodeError as error:
                    raise UserError(f"{path}: row {number}: not UTF-8 at byte {error.start} ({error.reason})") from None


def _is_text_type(kind: pa.DataType) -> bool:
    import pyarrow.types as of

    value = kind.value_type if of.is_dictionary(kind) else kind
    return of.is_string(value) or of.is_large_string(value) or of.is_string_view(value)


@dataclass(frozen=True)
class _Table:
    """An open file of either format."""

    schema: pa.Schema
    rows: int | None  # None where only reading tells
    batches: Callable[[str | None], Iterator[pa.RecordBatch]]  # of one column, or of all


@contextlib.contextmanager
def _open_table(path: Path) -> Iterator[_Table]:
    """UserError for what goes wrong until the file is closed again."""
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
