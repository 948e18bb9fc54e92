"""A table of words: a name for each row, a head for each column, notes below. As plain text or HTML."""

import html
from dataclasses import dataclass

from megatron.reports.html_tables import HtmlCell, HtmlColumn, render_html_table


@dataclass(frozen=True)
class TextTable:
    """Something to be read in rows and columns."""

    title: str
    corner_header: str
    """Over the names of the rows."""
    column_headers: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """A name, and a cell for each head."""
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Aligned columns, for terminals, logs and pipes."""
        lines = [(self.corner_header, *self.column_headers), *((name, *cells) for name, cells in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        aligned = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *(line.rstrip() for line in aligned), *self.notes]) + "\n"

    def to_markdown(self) -> str:
        """A GitHub table with its caption."""
        lines = [(self.corner_header, *self.column_headers), ("---",) * (1 + len(self.column_headers))]
        lines += [(name, *cells) for name, cells in self.rows]
        markdown_rows = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
        return "\n".join([*markdown_rows, "", f"{self.title}.", *self.notes]) + "\n"

    def to_html(self) -> str:
        """A `<table>` element; every text in it is escaped."""
        columns = [HtmlColumn(header, css_class="text") for header in self.column_headers]
        rows = [(html.escape(name), [HtmlCell(html.escape(cell)) for cell in cells]) for name, cells in self.rows]
        return render_html_table(
            self.corner_header, columns, rows, css_class="results", caption=" ".join([f"{self.title}.", *self.notes])
        )
