"""Tables of pages: names of rows on the left, and cells that narrow screens show under the names of their columns."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from megatron.reports.x_axes import join_headers


class HtmlColumn(NamedTuple):
    """Of a table; all are texts, which are escaped here."""

    header: str
    subheader: str = ""
    """In small print under the head."""
    css_class: str = ""
    """Class of its cells; those of "text" stand on the left."""


class HtmlCell(NamedTuple):
    """Of a table."""

    markup: str
    css_class: str = ""
    """Its class, beside its column's."""


def render_html_table(
    corner_header: str,
    columns: Sequence[HtmlColumn],
    rows: Sequence[tuple[str, Sequence[HtmlCell]]],
    *,
    css_class: str = "",
    caption: str = "",
) -> str:
    """A table. Each cell repeats its column's head in `data-label`, which narrow screens show.

    Args:
        corner_header: a text over the names of the rows.
        columns: the others.
        rows: markup of a name, and a cell for each column.
        css_class: the table's class.
        caption: a text below it.
    """
    header_cells = [f'<th scope="col">{html.escape(corner_header)}</th>']
    for column in columns:
        subheader = f"<small>{html.escape(column.subheader)}</small>" if column.subheader else ""
        class_attribute = _class_attribute("text") if "text" in column.css_class.split() else ""
        header_cells.append(f'<th scope="col"{class_attribute}>{html.escape(column.header)}{subheader}</th>')
    body_rows = []
    for name, cells in rows:
        row_cells = "".join(_render_cell(column, cell) for column, cell in zip(columns, cells, strict=True))
        body_rows.append(f'<tr><th scope="row">{name}</th>{row_cells}</tr>')
    caption_html = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head, body = f"<thead><tr>{''.join(header_cells)}</tr></thead>", f"<tbody>{''.join(body_rows)}</tbody>"
    return f"<table{_class_attribute(css_class)}>{caption_html}{head}{body}</table>"


def _render_cell(column: HtmlColumn, cell: HtmlCell) -> str:
    class_attribute = _class_attribute(" ".join(filter(None, [column.css_class, cell.css_class])))
    label = html.escape(join_headers(column.header, column.subheader))
    return f'<td{class_attribute} data-label="{label}">{cell.markup}</td>'


def _class_attribute(names: str) -> str:
    return f' class="{names}"' if names else ""
