"""A layout of records shown with rich, as Markdown, plain text or HTML: methods as rows, lengths or places as columns.

The best of each column is marked with `*` and in bold, so that the mark survives copying as plain text.
"""

import html
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.reports.layout import Cell, Layout, layouts
from megatron.reports.records import Record


def show(console: Console, records: Sequence[Record]) -> None:
    """Print every table of the records: framed where the terminal is wide enough, else (and in pipes) as plain text."""
    for layout in layouts(records):
        table = rich_table(layout)
        unlimited = console.options.update(max_width=1 << 20)
        if console.is_terminal and console.measure(table, options=unlimited).maximum <= console.width:
            console.print(table)
        else:
            console.print(Text(plain(layout)), soft_wrap=True, end="")


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
    heads = [_head(*head) for head in layout.heads()]
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
    """A `<table>` element; every text in it is escaped. `data-label` repeats a cell's head, for narrow screens."""
    heads = "".join(
        f'<th scope="col">{html.escape(times)}<small>{html.escape(tokens)}</small></th>'
        for times, tokens in layout.heads()
    )
    above, below = layout.change_head()
    if layout.changes:
        heads += f'<th scope="col" class="text">{html.escape(above)}<small>{html.escape(below)}</small></th>'
    rows = []
    for method in layout.methods:
        cells = []
        for place, head in zip(layout.places, layout.heads(), strict=True):
            cell = layout.cells.get((method, place))
            text = html.escape(layout.missing(method, place) if cell is None else str(cell))
            if cell is not None and cell.interval is not None:
                text += f"<small>{' – '.join(map(cell.metric.shown, cell.interval))}</small>"
            best = ' class="best"' if _best(cell) else ""
            cells.append(f'<td{best} data-label="{html.escape(_head(*head))}">{text}</td>')
        if layout.changes:
            change = html.escape(_change(layout, method))
            cells.append(f'<td class="text wide" data-label="{html.escape(f"{above} {below}")}">{change}</td>')
        rows.append(f'<tr><th scope="row">{html.escape(method)}</th>{"".join(cells)}</tr>')
    return (
        f'<table class="results"><caption>{html.escape(" ".join([f"{layout.title}.", *layout.notes]))}</caption>'
        f'<thead><tr><th scope="col">method</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _change(layout: Layout, method: str) -> str:
    return str(layout.changes.get(method, "–"))


def _head(above: str, below: str) -> str:
    """A column's two heads in one line."""
    return f"{above} ({below})" if above else below


def _aligned(layout: Layout, method: str, place: float) -> str:
    """With a blank where others have the mark, so that the digits of a column stand under each other."""
    cell = layout.cells.get((method, place))
    return f"{layout.missing(method, place)} " if cell is None else str(cell) + " " * (not cell.best)


def _best(cell: Cell | None) -> bool:
    return cell is not None and cell.best
