"""A layout of records shown with rich, as Markdown, plain text or HTML: methods as rows, lengths or places as columns.

The best of each column is marked with `*` and in bold, so that the mark survives copying as plain text.
"""

import html
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.reports import html_tables, missing_results
from megatron.reports.comparison_table import Cell, ComparisonTable, build_comparison_tables
from megatron.reports.failures import RunFailure
from megatron.reports.html_tables import HtmlColumn
from megatron.reports.records import Record
from megatron.reports.x_axes import join_headers


def print_comparison_tables(console: Console, records: Sequence[Record], failures: Sequence[RunFailure] = ()) -> None:
    """Print every table of the records: framed where the terminal is wide enough, else (and in pipes) as plain text.

    What they lack is listed below them, runs that failed among it.
    """
    tables = build_comparison_tables(records, failures)
    for table in tables:
        rendered = build_rich_table(table)
        unlimited = console.options.update(max_width=1 << 20)
        if console.is_terminal and console.measure(rendered, options=unlimited).maximum <= console.width:
            console.print(rendered)
        else:
            console.print(Text(render_comparison_text(table)), soft_wrap=True, end="")
    missing_table = missing_results.build_missing_table(tables)
    if missing_table is not None:
        console.print(Text(f"\n{missing_table.to_text()}"), soft_wrap=True, end="")


def build_rich_table(table: ComparisonTable) -> Table:
    """For a terminal; deviations over seeds stand under their means."""
    terminal_table = Table(
        title=table.title, caption="\n".join(table.notes), title_justify="left", caption_justify="left"
    )
    terminal_table.add_column("method", no_wrap=True)
    for multiple, x_text in table.get_column_headers():
        terminal_table.add_column(Text(f"{multiple} \n{x_text} "), justify="right", no_wrap=True)
    if table.changes:
        terminal_table.add_column(Text("\n".join(table.get_change_header())), no_wrap=True)
    for method in table.methods:
        row = [
            Text(
                _format_aligned_cell(table, method, x).replace(" ±", "\n±"),
                style="bold green" if _is_best(table.cells.get((method, x))) else "",
            )
            for x in table.x_values
        ]
        if table.changes:
            row.append(Text(_format_change(table, method)))
        terminal_table.add_row(Text(method), *row)
    return terminal_table


def render_comparison_markdown(table: ComparisonTable) -> str:
    """A GitHub table with its caption."""
    headers = [join_headers(*header_pair) for header_pair in table.get_column_headers()]
    change_headers = [" ".join(table.get_change_header())] if table.changes else []
    lines = [
        "| method | " + " | ".join([*headers, *change_headers]) + " |",
        "|---|" + "--:|" * len(headers) + "---|" * len(change_headers),
    ]
    for method in table.methods:
        cells = []
        for x in table.x_values:
            cell = table.cells.get((method, x))
            text = table.get_missing_text(method, x) if cell is None else str(cell)
            cells.append(f"**{text.rstrip('*')}**" if _is_best(cell) else text)
        cells += [_format_change(table, method)] if table.changes else []
        escaped = method.replace("|", "\\|")
        lines.append(f"| {escaped} | " + " | ".join(cells) + " |")
    notes = [note.replace("* best", "Bold: best") for note in table.notes]
    return "\n".join([*lines, "", f"{table.title}.", *notes]) + "\n"


def render_comparison_text(table: ComparisonTable) -> str:
    """Aligned columns without colour or frame, for logs and pipes."""
    headers = table.get_column_headers()
    rows = [["method", *(f"{multiple} " for multiple, _ in headers)], ["", *(f"{x_text} " for _, x_text in headers)]]
    for method in table.methods:
        rows.append([method, *(_format_aligned_cell(table, method, x) for x in table.x_values)])
    changes = [*table.get_change_header(), *(_format_change(table, method) for method in table.methods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for (name, *texts), change in zip(rows, changes, strict=True):
        padded = (text.rjust(width) for text, width in zip(texts, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded, *([change] if table.changes else [])]))
    return "\n".join([table.title, *(line.rstrip() for line in lines), *table.notes]) + "\n"


def render_comparison_html(table: ComparisonTable) -> str:
    """A `<table>` element; every text in it is escaped."""
    columns = [HtmlColumn(*header_pair) for header_pair in table.get_column_headers()]
    if table.changes:
        columns.append(HtmlColumn(*table.get_change_header(), css_class="text wide"))
    rows = []
    for method in table.methods:
        cells = [_render_html_cell(table, method, x) for x in table.x_values]
        if table.changes:
            cells.append(html_tables.HtmlCell(html.escape(_format_change(table, method))))
        rows.append((html.escape(method), cells))
    return html_tables.render_html_table(
        "method", columns, rows, css_class="results", caption=" ".join([f"{table.title}.", *table.notes])
    )


def _render_html_cell(table: ComparisonTable, method: str, x: float) -> html_tables.HtmlCell:
    """With its interval in small print."""
    cell = table.cells.get((method, x))
    if cell is None:
        return html_tables.HtmlCell(html.escape(table.get_missing_text(method, x)))
    interval = f"<small>{' – '.join(cell.interval_texts)}</small>" if cell.interval_texts else ""
    return html_tables.HtmlCell(html.escape(str(cell)) + interval, "best" if cell.is_best else "")


def _format_change(table: ComparisonTable, method: str) -> str:
    if method not in table.changes and not any(name == method for name, _ in table.cells):
        return table.get_missing_text(method, table.x_values[-1])
    return str(table.changes.get(method, "–"))


def _format_aligned_cell(table: ComparisonTable, method: str, x: float) -> str:
    """With a blank where others have the mark, so that the digits of a column stand under each other."""
    cell = table.cells.get((method, x))
    return f"{table.get_missing_text(method, x)} " if cell is None else str(cell) + " " * (not cell.is_best)


def _is_best(cell: Cell | None) -> bool:
    return cell is not None and cell.is_best
