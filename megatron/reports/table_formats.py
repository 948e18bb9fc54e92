r"""Rendering of tables with rich, or as Markdown, plain text, HTML, or LaTeX: comparison tables and text tables.

The best value of each column is bold and marked with `*`, which survives copying as plain text.

LaTeX needs the package booktabs, and graphicx for tables with many columns. Each table has a label, and commands for
its caption and notes. A document that defines such a command before it includes the file keeps its own text when the
file is written again:

    \newcommand{\captionPaperPerplexityPerToken}{Perplexity of our models beyond the training length.}
    \newcommand{\notesPaperPerplexityPerToken}{}
    \input{paper}
    Table~\ref{tab:paper-perplexity-per-token} compares the methods.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.table import Table
from rich.text import Text

from megatron.reports.axes import join_headers
from megatron.reports.comparison_table import Cell, ComparisonTable
from megatron.reports.html_page import HtmlCell, HtmlColumn, HtmlTable
from megatron.utils.formatting import escape_latex

LATEX_MARKER = "% Written by ./deepy.py report: change the records, not this file. It needs \\usepackage{booktabs}.\n"
SCALED_NOTE = "% Tables wider than a page are scaled, which needs \\usepackage{graphicx}.\n"
KEEP_NOTE = "% Define a caption or notes command before \\input to replace its text.\n"

_DIGIT_WORDS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
_NUMBER_START = re.compile(r"[(\[+−-]*\d")
MAX_NUMBER_LENGTH = 18
"""Maximum cell length of a numeric column; columns with longer cells are text."""


@dataclass(frozen=True)
class TextTable:
    """Table of text: a name for each row, a header for each column, and notes below."""

    title: str
    corner_header: str
    """Header of the row names."""
    column_headers: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """Name and cells of each row."""
    notes: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    """Sentences above the table, which explain its columns."""

    def to_text(self) -> str:
        """Format as aligned columns, for terminals, logs, and pipes. Long cells continue on further lines."""
        rows = [(self.corner_header, *self.column_headers), *((name, *cells) for name, cells in self.rows)]
        lines = [line for name, *cells in rows for line in zip_longest([name], *map(_wrap_cell, cells), fillvalue="")]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        aligned = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *self.lead, *(line.rstrip() for line in aligned), *self.notes]) + "\n"

    def to_markdown(self) -> str:
        """Format as a GitHub table with its caption."""
        lines = [(self.corner_header, *self.column_headers), ("---",) * (1 + len(self.column_headers))]
        lines += [(name, *cells) for name, cells in self.rows]
        markdown_rows = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
        lead = [*self.lead, ""] if self.lead else []
        return "\n".join([*lead, *markdown_rows, "", f"{self.title}.", *self.notes]) + "\n"

    def to_html(self) -> HtmlTable:
        """Build the table for a page, with right-aligned numbers."""
        columns = []
        for index, header in enumerate(self.column_headers):
            cells = [cells[index] for _, cells in self.rows]
            filled = [cell for cell in cells if cell != "–"]
            is_short = max(map(len, cells), default=0) <= MAX_NUMBER_LENGTH
            is_number = is_short and (not filled or any(map(_NUMBER_START.match, filled)))
            columns.append(HtmlColumn(header, css_class="" if is_number else "text"))
        rows = [(HtmlCell(name), [HtmlCell(cell) for cell in cells]) for name, cells in self.rows]
        return HtmlTable(self.corner_header, columns, rows, "results", self.title, self.notes, self.lead)


MAX_CELL_WIDTH = 60
"""Width from which a cell of a text table is wrapped, in columns."""


def _wrap_cell(cell: str) -> list[str]:
    if len(cell) <= MAX_CELL_WIDTH:
        return [cell]
    return textwrap.wrap(cell, MAX_CELL_WIDTH, break_long_words=False, break_on_hyphens=False)


def build_rich_table(table: ComparisonTable) -> Table:
    """Build a rich table for terminals, with deviations over seeds below the means."""
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
                style="bold green" if is_best(table.cells.get((method, x))) else "",
            )
            for x in table.x_values
        ]
        if table.changes:
            row.append(Text(format_change(table, method)))
        terminal_table.add_row(Text(method), *row)
    return terminal_table


def render_comparison_markdown(table: ComparisonTable) -> str:
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
            cells.append(f"**{text.rstrip('*')}**" if is_best(cell) else text)
        cells += [format_change(table, method)] if table.changes else []
        escaped = method.replace("|", "\\|")
        lines.append(f"| {escaped} | " + " | ".join(cells) + " |")
    notes = [note.replace("* best", "Bold: best") for note in table.notes]
    return "\n".join([*lines, "", f"{table.title}.", *notes]) + "\n"


def render_comparison_text(table: ComparisonTable) -> str:
    """Render aligned columns without color or frame, for logs and pipes."""
    headers = table.get_column_headers()
    rows = [["method", *(f"{multiple} " for multiple, _ in headers)], ["", *(f"{x_text} " for _, x_text in headers)]]
    for method in table.methods:
        rows.append([method, *(_format_aligned_cell(table, method, x) for x in table.x_values)])
    changes = [*table.get_change_header(), *(format_change(table, method) for method in table.methods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for (name, *texts), change in zip(rows, changes, strict=True):
        padded = (text.rjust(width) for text, width in zip(texts, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded, *([change] if table.changes else [])]))
    return "\n".join([table.title, *(line.rstrip() for line in lines), *table.notes]) + "\n"


def build_html_table(table: ComparisonTable) -> HtmlTable:
    """Build the table for a page."""
    columns = [HtmlColumn(*header_pair) for header_pair in table.get_column_headers()]
    if table.changes:
        columns.append(HtmlColumn(*table.get_change_header(), css_class="text wide"))
    rows = []
    for method in table.methods:
        cells = [_build_html_cell(table, method, x) for x in table.x_values]
        if table.changes:
            cells.append(HtmlCell(format_change(table, method)))
        rows.append((HtmlCell(method), cells))
    return HtmlTable("method", columns, rows, "results", table.title, table.notes)


def _build_html_cell(table: ComparisonTable, method: str, x: float) -> HtmlCell:
    cell = table.cells.get((method, x))
    if cell is None:
        return HtmlCell(table.get_missing_text(method, x))
    return HtmlCell(str(cell), " – ".join(cell.interval_texts) or None, "best" if cell.is_best else "")


def format_change(table: ComparisonTable, method: str) -> str:
    """Return the cell of the last column of a method: its change, or the reason why there is none."""
    if method not in table.changes and not any(name == method for name, _ in table.cells):
        return table.get_missing_text(method, table.x_values[-1])
    return str(table.changes.get(method, "–"))


def _format_aligned_cell(table: ComparisonTable, method: str, x: float) -> str:
    """Format a cell, padded with a space unless it has the mark, so that digits align."""
    cell = table.cells.get((method, x))
    return f"{table.get_missing_text(method, x)} " if cell is None else str(cell) + " " * (not cell.is_best)


def is_best(cell: Cell | None) -> bool:
    """Return True if a cell exists and is the best of its column."""
    return cell is not None and cell.is_best


MAX_COLUMN_CHARACTERS = 46
"""Number of characters, each 5 points wide, in one column of a two-column page (3.25 inches or 234 points)."""
PAGE_CHARACTERS = 96
"""Number of characters in a table across a page (7 inches or 506 points), with a margin for wide letters."""
PAGE_ROWS = 45
"""Number of rows, each 12 points high, on a page of 9 inches (650 points) with a caption and notes."""
MIN_WRAPPED_CHARACTERS = 24
"""Width from which a column may be wrapped, in characters."""
GAP_CHARACTERS = 2
"""Width of the gap between two columns of a table (12 points), in characters of 5 points."""


def _count_printed(text: str) -> int:
    """Count the characters that LaTeX prints: one for a command, none for bold type, braces and mathematics."""
    return len(re.sub(r"[{}$\\]", "", re.sub(r"\\[a-z]+", "x", text.replace(r"\textbf", ""))))


@dataclass(frozen=True)
class LatexTable:
    """Contents of a LaTeX table. All texts are LaTeX, except the title and the notes."""

    title: str
    columns: str
    """Column types of the tabular environment."""
    headers: Sequence[Sequence[str]]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def render(self, label: str) -> str:
        """Render a table environment with booktabs rules.

        A table longer than a page is several environments that share one number.

        Args:
            label: words separated by hyphens, from which the command names are derived.
        """
        command = "".join(word.capitalize() for word in re.sub(r"\d", _spell_out_digit, label).split("-"))
        lines = [rf"\providecommand{{\caption{command}}}{{{escape_latex(self.title)}.}}"]
        if self.notes:
            lines.append(rf"\providecommand{{\notes{command}}}{{{escape_latex(' '.join(self.notes))}}}")
        texts = [[_count_printed(text) for text in row] for row in (*self.headers, *self.rows)]
        widths = [max(column) for column in zip(*texts, strict=False)]
        # Across both columns of a page that has two; in a page with one column both environments are the same.
        width = sum(widths) + GAP_CHARACTERS * (len(widths) - 1)
        environment = "table*" if width > MAX_COLUMN_CHARACTERS else "table"
        columns = _wrap_columns(self.columns, widths) if width > PAGE_CHARACTERS else list(self.columns)
        begin, end = rf"\begin{{tabular}}{{{''.join(columns)}}}", r"\end{tabular}"
        if width > PAGE_CHARACTERS and columns == list(self.columns):
            begin, end = rf"\resizebox{{\textwidth}}{{!}}{{{begin}", f"{end}}}"
        rows = _format_lines(self.rows)
        for first in range(0, max(1, len(rows)), PAGE_ROWS):
            caption = [rf"\caption{{\caption{command}}}", rf"\label{{tab:{label}}}"]
            if first:
                caption = [r"\addtocounter{table}{-1}", rf"\caption{{\caption{command} (Continued.)}}"]
            lines += [
                rf"\begin{{{environment}}}", r"\centering", *caption, begin, r"\toprule", *_format_lines(self.headers),
                r"\midrule", *rows[first : first + PAGE_ROWS], r"\bottomrule", end,
            ]  # fmt: skip
            if self.notes and first + PAGE_ROWS >= len(rows):
                lines.append(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize\notes{command}}}")
            lines.append(rf"\end{{{environment}}}")
        return "\n".join(lines) + "\n"


def _wrap_columns(columns: str, widths: Sequence[int]) -> list[str]:
    """Return the column types of a table that is wider than a page, with wrapped columns if that makes it fit.

    Long columns share the space that short ones leave, the shortest of them first.
    """
    types, left = list(columns), PAGE_CHARACTERS - GAP_CHARACTERS * len(columns)
    wrapped = sorted((width, index) for index, width in enumerate(widths) if width > MIN_WRAPPED_CHARACTERS)
    left -= sum(width for width in widths if width <= MIN_WRAPPED_CHARACTERS)
    if left < MIN_WRAPPED_CHARACTERS * len(wrapped) or not wrapped:
        return types
    for number, (width, index) in enumerate(wrapped):
        share = min(width, left // (len(wrapped) - number))
        left -= share
        if share < width:
            types[index] = rf"p{{{share / (PAGE_CHARACTERS + GAP_CHARACTERS):.2f}\textwidth}}"
    return types


def render_latex_file(tables: Iterable[tuple[str | None, ComparisonTable | TextTable]], name: str) -> str:
    """Render a file of tables, whose captions and labels differ.

    Args:
        tables: tables in order, each with the title of its experiment, or None if it belongs to none.
        name: first word of all labels, which distinguishes the files of a document.
    """
    given = list(tables)
    has_experiments = len({experiment for experiment, _ in given}) > 1
    rendered = []
    labels: set[str] = set()
    captions: set[str] = set()
    for experiment, table in given:
        content = _convert_comparison(table) if isinstance(table, ComparisonTable) else _convert_text_table(table)
        words = [name, content.title.partition(", ")[0]]
        caption = content.title
        if experiment is not None:
            caption = f"{experiment}. {caption}"
            words[1:1] = [experiment.partition(":")[0]] * has_experiments
        label = _find_unused(_build_label(" ".join(words)), "-{}", labels)
        caption = _find_unused(caption, " ({})", captions)
        rendered.append(replace(content, title=caption).render(label))
    scaled = SCALED_NOTE if any(r"\resizebox" in text for text in rendered) else ""
    return "\n".join([LATEX_MARKER + scaled + KEEP_NOTE, *rendered])


def _find_unused(text: str, suffix: str, used: set[str]) -> str:
    """Return a text, with the first number from 2 that makes it unused, and add it to the used ones."""
    numbered = (text + suffix.format(number) for number in range(2, len(used) + 2))
    found = next(candidate for candidate in (text, *numbered) if candidate not in used)
    used.add(found)
    return found


def _build_label(text: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", text.lower())) or "results"


def _spell_out_digit(match: re.Match[str]) -> str:
    """Spell a digit, because names of LaTeX commands have letters only."""
    return f"-{_DIGIT_WORDS[int(match[0])]}-"


def _convert_text_table(table: TextTable) -> LatexTable:
    return LatexTable(
        table.title,
        "l" * (1 + len(table.column_headers)),
        [[escape_latex(header) for header in (table.corner_header, *table.column_headers)]],
        [[escape_latex(cell) for cell in (name, *cells)] for name, cells in table.rows],
        table.notes,
    )


def _convert_comparison(table: ComparisonTable) -> LatexTable:
    """Convert a comparison table. The best value of each column is bold."""
    multiples, texts = zip(*table.get_column_headers(), strict=True)
    headers = [["method", *map(escape_latex, multiples)], ["", *map(escape_latex, texts)]]
    rows = []
    for method in table.methods:
        cells = []
        for x in table.x_values:
            cell = table.cells.get((method, x))
            text = escape_latex(table.get_missing_text(method, x) if cell is None else str(cell).rstrip("*"))
            cells.append(rf"\textbf{{{text}}}" if is_best(cell) else text)
        rows.append([escape_latex(method), *cells])
    if table.changes:
        for line, header in zip(headers, table.get_change_header(), strict=True):
            line.append(escape_latex(header))
        for row, method in zip(rows, table.methods, strict=True):
            row.append(escape_latex(format_change(table, method)))
    notes = [note.replace("* best", "Bold: best") for note in table.notes]
    columns = "l" + "r" * len(table.x_values) + "l" * bool(table.changes)
    return LatexTable(table.title, columns, headers, rows, notes)


def _format_lines(lines: Sequence[Sequence[str]]) -> list[str]:
    return [" & ".join(line).rstrip() + r" \\" for line in lines]
