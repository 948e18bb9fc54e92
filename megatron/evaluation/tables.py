"""Methods as rows, lengths as columns: one layout of records, shown with rich, as Markdown, plain text or HTML.

With several seeds a cell is their mean ± sample standard deviation. The best of each column is marked with `*` and in
bold, so that the mark survives copying as plain text. The last column is the change from the shortest length to the
largest with its paired bootstrap interval, and in a word whether that excludes 1. Records of different protocols,
training lengths or target tokens are never put into one table, because their numbers cannot be compared.
"""

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    interval: tuple[float, float] | None = None  # 95%, of a single run

    def __str__(self) -> str:
        return number(self.mean) + ("" if self.deviation is None else f" ± {number(self.deviation)}") + "*" * self.best


@dataclass(frozen=True)
class Change:
    """Perplexity at the largest length over that at the shortest, of one method: mean and deviation over seeds."""

    mean: float
    deviation: float | None
    interval: tuple[float, float] | None  # 95%, of a single run
    verdict: str | None  # rises, falls, holds; of several seeds the one they share, else mixed

    def __str__(self) -> str:
        text = ratio(self.mean)
        if self.deviation is not None:
            text += f" ± {ratio(self.deviation)}"
        elif self.interval is not None:
            text += f" [{ratio(self.interval[0])}, {ratio(self.interval[1])}]"
        return text + ("" if self.verdict is None else f" {self.verdict}")


@dataclass(frozen=True)
class Layout:
    """A table of comparable records."""

    protocol: str
    train_length: int
    records: tuple[Record, ...]
    methods: tuple[str, ...]  # in the order of the records
    lengths: tuple[int, ...]  # ascending
    cells: dict[tuple[str, int], Cell]
    changes: dict[str, Change] = field(default_factory=dict)  # method → change; those that are known
    limits: dict[str, int] = field(default_factory=dict)  # method → positions that it knows, where they end
    text: str | None = None  # what was scored, if there are tables of other texts beside this one

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
        text = "" if self.text is None else f", text {self.text}"
        return f"Perplexity, trained at {self.train_length:,} tokens, protocol {self.protocol}{text}"

    @property
    def caption(self) -> str:
        """What was counted and how to read the cells."""
        tokens = sorted({record.tokens for record in self.records})
        counted = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        spread = f"; mean ± standard deviation of {self.repeats} seeds" if self.repeats > 1 else ""
        text = f"{counted} tokens scored at every length{spread}; * best of its column"
        own = [(cell.mean, *cell.interval) for cell in self.cells.values() if cell.interval is not None]
        if own:
            low, high = min(low / mean for mean, low, _ in own), max(high / mean for mean, _, high in own)
            text += f"; 95% bootstrap intervals of single cells are within {low - 1:+.0%} and {high - 1:+.0%}"
        if self.changes:
            text += (
                f"; change: perplexity at {self.lengths[-1]:,} over that at {self.lengths[0]:,} tokens"
                + (" [95% paired bootstrap interval]" if self.repeats == 1 else "; the verdict is that of every seed")
                + ": holds if 1 is inside or it is below 0.5%, else rises or falls"
            )
        return text

    def heads(self) -> list[tuple[str, str]]:
        """A column's two heads: multiple of the training length, tokens."""
        return [(multiple(length / self.train_length), f"{length:,}") for length in self.lengths]

    def change_head(self) -> tuple[str, str]:
        """The two heads of the column of changes."""
        first, last = (multiple(length / self.train_length) for length in (self.lengths[0], self.lengths[-1]))
        return "change", f"{first} to {last}"

    def missing(self, method: str, length: int) -> str:
        """What stands where a method has no number: its largest length if that is why, else a dash."""
        limit = self.limits.get(method)
        return f"max {limit:,}" if limit is not None and limit < length else "–"


def number(value: float) -> str:
    """Two decimals, or none where the number is large: 4.87, 29.64, 152.3, 16,443."""
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def ratio(value: float) -> str:
    """Three decimals below 10, where a paired interval can be as narrow as a percent: 1.002, 6.43, 29.64."""
    return f"{value:.3f}" if value < 10 else number(value)


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
    several = len({record.dataset for record in records}) > 1
    return [_layout(group, name_text=several) for group in groups.values()]


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
    if layout.changes:
        table.add_column(Text("\n".join(layout.change_head())), no_wrap=True)
    for method in layout.methods:
        row = [
            Text(
                _aligned(layout, method, length).replace(" ±", "\n±"),
                style="bold green" if _best(layout.cells.get((method, length))) else "",
            )
            for length in layout.lengths
        ]
        if layout.changes:
            row.append(Text(_change(layout, method)))
        table.add_row(Text(method), *row)
    return table


def markdown(layout: Layout) -> str:
    """A GitHub table with its caption."""
    heads = [f"{times} ({tokens})" for times, tokens in layout.heads()]
    change = [" ".join(layout.change_head())] if layout.changes else []
    lines = [
        "| method | " + " | ".join([*heads, *change]) + " |",
        "|---|" + "--:|" * len(heads) + "---|" * len(change),
    ]
    for method in layout.methods:
        cells = []
        for length in layout.lengths:
            cell = layout.cells.get((method, length))
            text = layout.missing(method, length) if cell is None else str(cell)
            cells.append(f"**{text.rstrip('*')}**" if _best(cell) else text)
        cells += [_change(layout, method)] if layout.changes else []
        escaped = method.replace("|", "\\|")
        lines.append(f"| {escaped} | " + " | ".join(cells) + " |")
    caption = layout.caption.replace("* best of its column", "bold: best of its column")
    return "\n".join(lines) + f"\n\n{layout.title}. {caption[0].upper()}{caption[1:]}.\n"


def plain(layout: Layout) -> str:
    """Aligned columns without colour or frame, for logs and pipes."""
    heads = layout.heads()
    rows = [["method", *(f"{times} " for times, _ in heads)], ["", *(f"{tokens} " for _, tokens in heads)]]
    for method in layout.methods:
        rows.append([method, *(_aligned(layout, method, length) for length in layout.lengths)])
    changes = [*layout.change_head(), *(_change(layout, method) for method in layout.methods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for (name, *texts), change in zip(rows, changes, strict=True):
        padded = (text.rjust(width) for text, width in zip(texts, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded, *([change] if layout.changes else [])]))
    return "\n".join([layout.title, *(line.rstrip() for line in lines), layout.caption]) + "\n"


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
        for length, (times, tokens) in zip(layout.lengths, layout.heads(), strict=True):
            cell = layout.cells.get((method, length))
            text = html.escape(layout.missing(method, length) if cell is None else str(cell))
            if cell is not None and cell.interval is not None:
                text += f"<small>{number(cell.interval[0])} – {number(cell.interval[1])}</small>"
            best = ' class="best"' if _best(cell) else ""
            cells.append(f'<td{best} data-label="{html.escape(f"{times} ({tokens})")}">{text}</td>')
        if layout.changes:
            change = html.escape(_change(layout, method))
            cells.append(f'<td class="text wide" data-label="{html.escape(f"{above} {below}")}">{change}</td>')
        rows.append(f'<tr><th scope="row">{html.escape(method)}</th>{"".join(cells)}</tr>')
    return (
        f'<table class="results"><caption>{html.escape(layout.title)}. {html.escape(layout.caption)}.</caption>'
        f'<thead><tr><th scope="col">method</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _layout(records: Sequence[Record], *, name_text: bool = False) -> Layout:
    latest = {(record.method, record.length, record.seed, record.run): record for record in records}
    found: dict[tuple[str, int], list[Record]] = {}
    for record in latest.values():
        found.setdefault((record.method, record.length), []).append(record)
    lengths = tuple(sorted({record.length for record in records}))
    means = {place: statistics.fmean(each.perplexity for each in same) for place, same in found.items()}
    best = {length: min(mean for (_, where), mean in means.items() if where == length) for length in lengths}
    # One method alone is not the best of anything.
    several = len({record.method for record in records}) > 1
    cells = {
        (method, length): Cell(
            mean=means[method, length],
            deviation=_deviation([each.perplexity for each in same]),
            best=several and means[method, length] == best[length],
            interval=same[0].bootstrapped if len(same) == 1 else None,
        )
        for (method, length), same in found.items()
    }
    changes = {
        method: _change_over_seeds(same)
        for (method, length), same in found.items()
        if length == lengths[-1] and all(each.change is not None and each.change_from == lengths[0] for each in same)
    }
    return Layout(
        protocol=records[0].protocol,
        train_length=records[0].train_length,
        records=tuple(latest.values()),
        methods=tuple(dict.fromkeys(record.method for record in records)),
        lengths=lengths,
        cells=cells,
        changes=changes,
        limits={record.method: record.max_length for record in latest.values() if record.max_length is not None},
        text=records[0].dataset if name_text else None,
    )


def _change_over_seeds(records: Sequence[Record]) -> Change:
    values = [record.change for record in records if record.change is not None]
    verdicts = {record.verdict for record in records}
    only = records[0] if len(records) == 1 else None
    interval = None
    if only is not None and only.change_low is not None and only.change_high is not None:
        interval = (only.change_low, only.change_high)
    return Change(
        mean=statistics.fmean(values),
        deviation=_deviation(values),
        interval=interval,
        verdict=verdicts.pop() if len(verdicts) == 1 else None if None in verdicts else "mixed",
    )


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _change(layout: Layout, method: str) -> str:
    return str(layout.changes.get(method, "–"))


def _aligned(layout: Layout, method: str, length: int) -> str:
    """With a blank where others have the mark, so that the digits of a column stand under each other."""
    cell = layout.cells.get((method, length))
    return f"{layout.missing(method, length)} " if cell is None else str(cell) + " " * (not cell.best)


def _best(cell: Cell | None) -> bool:
    return cell is not None and cell.best
