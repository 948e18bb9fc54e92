"""Needle maps as tables and figures: values over depth and length, with one map for each method.

Records over depth form a table for each length (`comparison_table.py`). Tables that differ only in length are combined
into one map, with a row for each depth of each method, and a column for each length. Cells are shaded by how good they
are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.reports.axes import format_multiple, join_headers
from megatron.reports.comparison_table import Cell, ComparisonTable
from megatron.reports.html_page import HtmlCell, HtmlColumn, HtmlTable
from megatron.reports.method_rows import quote_method
from megatron.reports.metrics import Metric
from megatron.reports.table_formats import TextTable

SHADES = " ░▒▓█"
"""Shades in text, from worst to best."""
NUM_HTML_SHADES = 10
"""Number of shade classes of the style sheet, shade0 to shade9."""


@dataclass(frozen=True)
class HtmlDepthMap:
    """Squares of one method's map, for the macro `depth_map`."""

    method: str
    num_columns: int
    num_rows: int
    squares: dict[int, str]
    """Shade → SVG path of its squares, each of size 1 × 1."""
    num_trained_columns: int | None
    """Number of columns up to the training length, if more follow."""


@dataclass(frozen=True)
class DepthMap:
    """Values of one metric over depth and length, for methods evaluated on the same sequences."""

    tables: tuple[ComparisonTable, ...]
    """Tables over depth, one for each length, ascending."""

    @property
    def metric(self) -> Metric:
        return self.tables[0].metric

    @cached_property
    def lengths(self) -> list[int]:
        return [table.records[0].length for table in self.tables]

    @cached_property
    def depths(self) -> list[float]:
        return sorted({x for table in self.tables for x in table.x_values})

    @cached_property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for table in self.tables for method in table.methods))

    @property
    def title(self) -> str:
        first = self.tables[0]
        text = "" if first.text is None else f", text {first.text}"
        return (
            f"{self.metric.title_with_unit} by depth and length, trained at {first.train_length:,} tokens, "
            f"{first.protocol_description}{text}"
        )

    @property
    def notes(self) -> list[str]:
        """Notes on how to read the map, one sentence each."""
        num_seeds = max(table.max_seeds for table in self.tables)
        notes = [
            f"Depth is the share of the text before the answer. {self.metric.better.capitalize()} scores are better."
        ]
        if num_seeds > 1:
            notes.append(f"Cells are means of up to {num_seeds} seeds.")
        records = (record for table in self.tables for record in table.records)
        return [*notes, *dict.fromkeys(record.remark for record in records if record.remark is not None)]

    def get_cell(self, method: str, depth: float, length: int) -> Cell | None:
        table = self.tables[self.lengths.index(length)]
        return table.cells.get((method, depth))

    def get_values(self, method: str) -> np.ndarray:
        """Return the values of a method, float64 [depths, lengths], with NaN for missing ones."""
        cells = [[self.get_cell(method, depth, length) for length in self.lengths] for depth in self.depths]
        return np.array([[np.nan if cell is None else cell.mean for cell in row] for row in cells])

    @cached_property
    def scale(self) -> tuple[float, float]:
        """Range of the shades: the range of the metric, or of all cells if unlimited."""
        values = np.concatenate([self.get_values(method).ravel() for method in self.methods])
        low = self.metric.min_value if np.isfinite(self.metric.max_value) else float(np.nanmin(values))
        high = min(self.metric.max_value, float(np.nanmax(values)))
        return low, self.metric.max_value if np.isfinite(self.metric.max_value) else max(high, low + 1e-9)

    def compute_shade_index(self, value: float, num_shades: int) -> int:
        """Return the shade of a value, from 0 for the worst to `num_shades` − 1 for the best."""
        low, high = self.scale
        share = (value - low) / (high - low)
        share = share if self.metric.better == "higher" else 1 - share
        return min(max(int(share * num_shades), 0), num_shades - 1)

    def build_text_table(self) -> TextTable:
        """Build the table for terminals, logs, and Markdown."""
        train_length = self.tables[0].train_length
        headers = [join_headers(format_multiple(length / train_length), f"{length:,}") for length in self.lengths]
        rows = []
        for method in self.methods:
            for depth in self.depths:
                texts = (self._format_cell(method, depth, length) for length in self.lengths)
                rows.append((method, (f"{depth:.4g}", *texts)))
        return TextTable(self.title, "method", ("depth", *headers), tuple(rows), tuple(self.notes))

    def _format_cell(self, method: str, depth: float, length: int) -> str:
        cell = self.get_cell(method, depth, length)
        if cell is None:
            return self._get_missing_text(method, length)
        return f"{cell.mean_text} {SHADES[self.compute_shade_index(cell.mean, len(SHADES))]}".rstrip()

    def _get_missing_text(self, method: str, length: int) -> str:
        max_lengths = (table.max_lengths.get(method) for table in self.tables)
        max_length = next((known for known in max_lengths if known is not None), None)
        return f"max {max_length:,}" if max_length is not None and max_length < length else "–"

    def build_html_table(self) -> HtmlTable:
        """Build the table for a page, with intervals and shaded cells."""
        train_length = self.tables[0].train_length
        columns = [HtmlColumn("depth")]
        columns += [HtmlColumn(format_multiple(length / train_length), f"{length:,}") for length in self.lengths]
        rows = []
        for method in self.methods:
            for depth in self.depths:
                cells = [self._build_html_cell(method, depth, length) for length in self.lengths]
                rows.append((HtmlCell(method), [HtmlCell(f"{depth:.4g}"), *cells]))
        return HtmlTable("method", columns, rows, "results", self.title, tuple(self.notes))

    def _build_html_cell(self, method: str, depth: float, length: int) -> HtmlCell:
        cell = self.get_cell(method, depth, length)
        if cell is None:
            return HtmlCell(self._get_missing_text(method, length))
        note = " – ".join(cell.interval_texts) or None
        return HtmlCell(cell.mean_text, note, f"shade{self.compute_shade_index(cell.mean, NUM_HTML_SHADES)}")

    def list_html_maps(self) -> list[HtmlDepthMap]:
        return [self._build_html_map(method) for method in self.methods]

    def _build_html_map(self, method: str) -> HtmlDepthMap:
        values = self.get_values(method)
        squares: dict[int, list[str]] = {}
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                squares.setdefault(self.compute_shade_index(value, NUM_HTML_SHADES), []).append(
                    f"M{column} {row}h1v1h-1z"
                )
        num_trained_columns = sum(length <= self.tables[0].train_length for length in self.lengths)
        return HtmlDepthMap(
            method,
            len(self.lengths),
            len(self.depths),
            {shade: "".join(paths) for shade, paths in sorted(squares.items())},
            num_trained_columns if 0 < num_trained_columns < len(self.lengths) else None,
        )

    def describe(self) -> str:
        """Describe the map in words for screen readers: the mean of each method at every length."""
        parts = []
        for method in self.methods:
            columns = zip(self.get_values(method).T, self.lengths, strict=True)
            finite = ((column[np.isfinite(column)], length) for column, length in columns)
            texts = (f"{self.metric.format_value(float(own.mean()))} at {length:,}"
                     for own, length in finite if own.size)  # fmt: skip
            parts.append(f"{quote_method(method)} {', '.join(texts)}")
        return f"Map of {self.title[0].lower()}{self.title[1:]}; means over depths: {'; '.join(parts)}."


def split_depth_maps(tables: Sequence[ComparisonTable]) -> tuple[list[ComparisonTable], list[DepthMap]]:
    """Separate tables over depth from other tables, and combine them into maps."""
    others: list[ComparisonTable] = []
    groups: dict[tuple[str, str, int, str | None], list[ComparisonTable]] = {}
    for table in tables:
        if table.axis.name == "depth":
            key = (table.metric.name, table.protocol, table.train_length, table.records[0].target_digest)
            groups.setdefault(key, []).append(table)
        else:
            others.append(table)
    by_length = (sorted(group, key=lambda table: table.records[0].length) for group in groups.values())
    return others, [DepthMap(tuple(group)) for group in by_length]
