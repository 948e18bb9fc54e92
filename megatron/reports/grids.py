"""A table of words: a name for each row, a head for each column, notes below. As plain text or HTML."""

import html
from dataclasses import dataclass


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

    def html(self) -> str:
        """A `<table>` element; every text in it is escaped. `data-label` repeats a cell's head, for narrow screens."""
        heads = "".join(f'<th scope="col" class="text">{html.escape(head)}</th>' for head in self.heads)
        rows = []
        for name, cells in self.rows:
            inside = "".join(
                f'<td class="text" data-label="{html.escape(head)}">{html.escape(cell)}</td>'
                for head, cell in zip(self.heads, cells, strict=True)
            )
            rows.append(f'<tr><th scope="row">{html.escape(name)}</th>{inside}</tr>')
        caption = html.escape(" ".join([f"{self.title}.", *self.notes]))
        return (
            f'<table class="results"><caption>{caption}</caption>'
            f'<thead><tr><th scope="col">{html.escape(self.corner)}</th>{heads}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table>"
        )
