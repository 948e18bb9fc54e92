"""Tables of pages: names of rows on the left, and cells that narrow screens show under the names of their columns."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from megatron.reports.axes import in_one_line


class Column(NamedTuple):
    """Of a table; all are texts, which are escaped here."""

    head: str
    below: str = ""
    """In small print under the head."""
    kind: str = ""
    """Class of its cells; those of "text" stand on the left."""


class Cell(NamedTuple):
    """Of a table."""

    markup: str
    kind: str = ""
    """Its class, beside its column's."""


def table(
    corner: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[str, Sequence[Cell]]],
    *,
    kind: str = "",
    caption: str = "",
) -> str:
    """A table. Each cell repeats its column's head in `data-label`, which narrow screens show.

    Args:
        corner: a text over the names of the rows.
        columns: the others.
        rows: markup of a name, and a cell for each column.
        kind: the table's class.
        caption: a text below it.
    """
    heads = [f'<th scope="col">{html.escape(corner)}</th>']
    for column in columns:
        below = f"<small>{html.escape(column.below)}</small>" if column.below else ""
        left = _class("text") if "text" in column.kind.split() else ""
        heads.append(f'<th scope="col"{left}>{html.escape(column.head)}{below}</th>')
    lines = []
    for name, cells in rows:
        inside = "".join(_cell(column, cell) for column, cell in zip(columns, cells, strict=True))
        lines.append(f'<tr><th scope="row">{name}</th>{inside}</tr>')
    told = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head, body = f"<thead><tr>{''.join(heads)}</tr></thead>", f"<tbody>{''.join(lines)}</tbody>"
    return f"<table{_class(kind)}>{told}{head}{body}</table>"


def _cell(column: Column, cell: Cell) -> str:
    kind = _class(" ".join(filter(None, [column.kind, cell.kind])))
    return f'<td{kind} data-label="{html.escape(in_one_line(column.head, column.below))}">{cell.markup}</td>'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
