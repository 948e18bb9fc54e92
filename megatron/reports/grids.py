"""A table of words: a name for each row, a head for each column, notes below. As plain text or HTML."""

import html
from dataclasses import dataclass

from megatron.reports.html_tables import Cell, Column, table


@dataclass(frozen=True)
class Grid:
    """Something to be read in rows and columns."""

    title: str
    corner: str
    """Over the names of the rows."""
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """A name, and a cell for each head."""
    notes: tuple[str, ...] = ()

    def plain(self) -> str:
        """Aligned columns, for terminals, logs and pipes."""
        lines = [(self.corner, *self.heads), *((name, *cells) for name, cells in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *(line.rstrip() for line in text), *self.notes]) + "\n"

    def markdown(self) -> str:
        """A GitHub table with its caption."""
        lines = [(self.corner, *self.heads), ("---",) * (1 + len(self.heads))]
        lines += [(name, *cells) for name, cells in self.rows]
        table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
        return "\n".join([*table, "", f"{self.title}.", *self.notes]) + "\n"

    def html(self) -> str:
        """A `<table>` element; every text in it is escaped."""
        columns = [Column(head, kind="text") for head in self.heads]
        rows = [(html.escape(name), [Cell(html.escape(cell)) for cell in cells]) for name, cells in self.rows]
        return table(self.corner, columns, rows, kind="results", caption=" ".join([f"{self.title}.", *self.notes]))
