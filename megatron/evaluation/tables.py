"""Methods as rows, lengths as columns: one layout of records, shown with rich, as Markdown, plain text or HTML.

With several seeds a cell is their mean ± sample standard deviation. The best of each column is marked with `*` and in
bold, so that the mark survives copying as plain text. Records of different protocols, training lengths or target
tokens are never put into one table, because their numbers cannot be compared.
"""

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.evaluation.records import Record


@dataclass(frozen=True)
class Cell:
    """One method at one length: mean over seeds, and their sample standard deviation where there are several."""

    mean: float
    deviation: float | None
    best: bool

    def __str__(self) -> str:
        return number(self.mean) + ("" if self.deviation is None else f" ± {number(self.deviation)}") + "*" * self.best


@dataclass(frozen=True)
class Layout:
    """A table of comparable records."""

    protocol: str
    train_length: int
    records: tuple[Record, ...]
    methods: tuple[str, ...]  # in the order of the records
    lengths: tuple[int, ...]  # ascending
    cells: dict[tuple[str, int], Cell]

    @property
    def repeats(self) -> int:
        """The largest number of runs behind a cell; they differ in their seed."""
        counts: dict[tuple[str, int], int] = {}
        for record in self.records:
            counts[record.method, record.length] = counts.get((record.method, record.length), 0) + 1
        return max(counts.values())

    @property
    def title(self) -> str:
        """What the table shows, in one line."""
        return f"Perplexity, trained at {self.train_length:,} tokens, protocol {self.protocol}"

    @property
    def caption(self) -> str:
        """What was counted and how to read the cells."""
        tokens = sorted({record.tokens for record in self.records})
        counted = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        spread = f"; mean ± standard deviation of {self.repeats} seeds" if self.repeats > 1 else ""
        return f"{counted} tokens scored at every length{spread}; * best of its column"

    def heads(self) -> list[tuple[str, str]]:
        """A column's two heads: multiple of the training length, tokens."""
        return [(multiple(length / self.train_length), f"{length:,}") for length in self.lengths]


def number(value: float) -> str:
    """Two decimals, or none where the number is large: 4.87, 29.64, 152.3, 16,443."""
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def multiple(value: float) -> str:
    """1×, 32×, 1.5×."""
    return f"{value:.3g}×" if value < 1000 else f"{value:,.0f}×"


def layouts(records: Sequence[Record]) -> list[Layout]:
    """Sort records into tables whose numbers may be compared: one per protocol, training length and set of targets.

    A record that repeats an earlier one (same method, length, seed and run) replaces it.
    """
    groups: dict[tuple[str, int, str | None], list[Record]] = {}
    for record in records:
        groups.setdefault((record.protocol, record.train_length, record.target_digest), []).append(record)
    return [_layout(group) for group in groups.values()]


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
    table = Table(title=layout.title, caption=layout.caption, title_justify="left", caption_justify="left")
    table.add_column("method", no_wrap=True)
    for times, tokens in layout.heads():
        table.add_column(Text(f"{times} \n{tokens} "), justify="right", no_wrap=True)
    for method in layout.methods:
        row = (layout.cells.get((method, length)) for length in layout.lengths)
        table.add_row(
            Text(method),
            *(Text(_aligned(cell).replace(" ±", "\n±"), style="bold green" if _best(cell) else "") for cell in row),
        )
    return table


def markdown(layout: Layout) -> str:
    """A GitHub table with its caption."""
    heads = [f"{times} ({tokens})" for times, tokens in layout.heads()]
    lines = [
        "| method | " + " | ".join(heads) + " |",
        "|---|" + "--:|" * len(heads),
    ]
    for method in layout.methods:
        cells = []
        for length in layout.lengths:
            cell = layout.cells.get((method, length))
            text = "–" if cell is None else str(cell)
            cells.append(f"**{text.rstrip('*')}**" if _best(cell) else text)
        escaped = method.replace("|", "\\|")
        lines.append(f"| {escaped} | " + " | ".join(cells) + " |")
    caption = layout.caption.replace("* best of its column", "bold: best of its column")
    return "\n".join(lines) + f"\n\n{layout.title}. {caption[0].upper()}{caption[1:]}.\n"


def plain(layout: Layout) -> str:
    """Aligned columns without colour or frame, for logs and pipes."""
    heads = layout.heads()
    rows = [["method", *(f"{times} " for times, _ in heads)], ["", *(f"{tokens} " for _, tokens in heads)]]
    for method in layout.methods:
        rows.append([method, *(_aligned(layout.cells.get((method, length))) for length in layout.lengths)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *texts in rows:
        padded = (text.rjust(width) for text, width in zip(texts, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join([layout.title, *(line.rstrip() for line in lines), layout.caption]) + "\n"


def html_table(layout: Layout) -> str:
    """A `<table>` element; every text in it is escaped."""
    heads = "".join(
        f'<th scope="col">{html.escape(times)}<small>{html.escape(tokens)}</small></th>'
        for times, tokens in layout.heads()
    )
    rows = []
    for method in layout.methods:
        cells = []
        for length in layout.lengths:
            cell = layout.cells.get((method, length))
            text = "–" if cell is None else html.escape(str(cell))
            cells.append(f'<td class="best">{text}</td>' if _best(cell) else f"<td>{text}</td>")
        rows.append(f'<tr><th scope="row">{html.escape(method)}</th>{"".join(cells)}</tr>')
    return (
        f"<table><caption>{html.escape(layout.title)}. {html.escape(layout.caption)}.</caption>"
        f'<thead><tr><th scope="col">method</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _layout(records: Sequence[Record]) -> Layout:
    latest = {(record.method, record.length, record.seed, record.run): record for record in records}
    values: dict[tuple[str, int], list[float]] = {}
    for record in latest.values():
        values.setdefault((record.method, record.length), []).append(record.perplexity)
    lengths = tuple(sorted({record.length for record in records}))
    means = {place: statistics.fmean(found) for place, found in values.items()}
    best = {length: min(mean for (_, where), mean in means.items() if where == length) for length in lengths}
    # One method alone is not the best of anything.
    several = len({record.method for record in records}) > 1
    cells = {
        (method, length): Cell(
            mean=means[method, length],
            deviation=statistics.stdev(found) if len(found) > 1 else None,
            best=several and means[method, length] == best[length],
        )
        for (method, length), found in values.items()
    }
    return Layout(
        protocol=records[0].protocol,
        train_length=records[0].train_length,
        records=tuple(latest.values()),
        methods=tuple(dict.fromkeys(record.method for record in records)),
        lengths=lengths,
        cells=cells,
    )


def _aligned(cell: Cell | None) -> str:
    """With a blank where others have the mark, so that the digits of a column stand under each other."""
    return "– " if cell is None else str(cell) + " " * (not cell.best)


def _best(cell: Cell | None) -> bool:
    return cell is not None and cell.best
