"""A layout of records shown with rich, as Markdown, plain text or HTML: methods as rows, lengths or places as columns.

The best of each column is marked with `*` and in bold, so that the mark survives copying as plain text.
"""

import html
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.reports import html_tables, missing
from megatron.reports.axes import in_one_line
from megatron.reports.failures import Failure
from megatron.reports.html_tables import Column
from megatron.reports.layout import Cell, Layout, layouts
from megatron.reports.records import Record


def show(console: Console, records: Sequence[Record], failures: Sequence[Failure] = ()) -> None:
    """Print every table of the records: framed where the terminal is wide enough, else (and in pipes) as plain text.

    What they lack is listed below them, runs that failed among it.
    """
    groups = layouts(records, failures)
    for layout in groups:
        table = rich_table(layout)
        unlimited = console.options.update(max_width=1 << 20)
        if console.is_terminal and console.measure(table, options=unlimited).maximum <= console.width:
            console.print(table)
        else:
            console.print(Text(plain(layout)), soft_wrap=True, end="")
    absent = missing.grid(groups)
    if absent is not None:
        console.print(Text(f"\n{absent.plain()}"), soft_wrap=True, end="")


def rich_table(layout: Layout) -> Table:
    """For a terminal; deviations over seeds stand under their means."""
    table = Table(title=layout.title, caption="\n".join(layout.notes), title_justify="left", caption_justify="left")
    table.add_column("method", no_wrap=True)
    for times, tokens in layout.heads():
        table.add_column(Text(f"{times} \n{tokens} "), justify="right", no_wrap=True)
    if layout.changes:
        table.add_column(Text("\n".join(layout.change_head())), no_wrap=True)
    for method in layout.methods:
        row = [
            Text(
                _aligned(layout, method, place).replace(" ±", "\n±"),
                style="bold green" if _best(layout.cells.get((method, place))) else "",
            )
            for place in layout.places
        ]
        if layout.changes:
            row.append(Text(_change(layout, method)))
        table.add_row(Text(method), *row)
    return table


def markdown(layout: Layout) -> str:
    """A GitHub table with its caption."""
    heads = [in_one_line(*head) for head in layout.heads()]
    change = [" ".join(layout.change_head())] if layout.changes else []
    lines = [
        "| method | " + " | ".join([*heads, *change]) + " |",
        "|---|" + "--:|" * len(heads) + "---|" * len(change),
    ]
    for method in layout.methods:
        cells = []
        for place in layout.places:
            cell = layout.cells.get((method, place))
            text = layout.missing(method, place) if cell is None else str(cell)
            cells.append(f"**{text.rstrip('*')}**" if _best(cell) else text)
        cells += [_change(layout, method)] if layout.changes else []
        escaped = method.replace("|", "\\|")
        lines.append(f"| {escaped} | " + " | ".join(cells) + " |")
    notes = [note.replace("* best", "Bold: best") for note in layout.notes]
    return "\n".join([*lines, "", f"{layout.title}.", *notes]) + "\n"


def plain(layout: Layout) -> str:
    """Aligned columns without colour or frame, for logs and pipes."""
    heads = layout.heads()
    rows = [["method", *(f"{times} " for times, _ in heads)], ["", *(f"{tokens} " for _, tokens in heads)]]
    for method in layout.methods:
        rows.append([method, *(_aligned(layout, method, place) for place in layout.places)])
    changes = [*layout.change_head(), *(_change(layout, method) for method in layout.methods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for (name, *texts), change in zip(rows, changes, strict=True):
        padded = (text.rjust(width) for text, width in zip(texts, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded, *([change] if layout.changes else [])]))
    return "\n".join([layout.title, *(line.rstrip() for line in lines), *layout.notes]) + "\n"


def html_table(layout: Layout) -> str:
    """A `<table>` element; every text in it is escaped."""
    columns = [Column(*heads) for heads in layout.heads()]
    if layout.changes:
        columns.append(Column(*layout.change_head(), kind="text wide"))
    rows = []
    for method in layout.methods:
        cells = [_html_cell(layout, method, place) for place in layout.places]
        if layout.changes:
            cells.append(html_tables.Cell(html.escape(_change(layout, method))))
        rows.append((html.escape(method), cells))
    return html_tables.table(
        "method", columns, rows, kind="results", caption=" ".join([f"{layout.title}.", *layout.notes])
    )


def _html_cell(layout: Layout, method: str, place: float) -> html_tables.Cell:
    """With its interval in small print."""
    cell = layout.cells.get((method, place))
    if cell is None:
        return html_tables.Cell(html.escape(layout.missing(method, place)))
    interval = f"<small>{' – '.join(cell.ends)}</small>" if cell.ends else ""
    return html_tables.Cell(html.escape(str(cell)) + interval, "best" if cell.best else "")


def _change(layout: Layout, method: str) -> str:
    if method not in layout.changes and not any(name == method for name, _ in layout.cells):
        return layout.missing(method, layout.places[-1])
    return str(layout.changes.get(method, "–"))


def _aligned(layout: Layout, method: str, place: float) -> str:
    """With a blank where others have the mark, so that the digits of a column stand under each other."""
    cell = layout.cells.get((method, place))
    return f"{layout.missing(method, place)} " if cell is None else str(cell) + " " * (not cell.best)


def _best(cell: Cell | None) -> bool:
    return cell is not None and cell.best
