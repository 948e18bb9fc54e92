"""Self-contained page of all analyses: text, charts, tables, and figures.

Functions are shown as interactive charts. Maps are images embedded as base64, in two widths, so that the page is
readable on screens of 400 pixels. If an analysis does not apply to a model, the page states the reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import cast

from megatron.evaluation.analysis.analysis import Block, Figure, Table
from megatron.reports.charts import Chart
from megatron.reports.citation import describe_reproduction
from megatron.reports.html_page import (
    HtmlCell,
    HtmlColumn,
    HtmlPicture,
    HtmlTable,
    encode_picture,
    render_template,
)

MIN_TEXT_LENGTH = 40
"""Maximum cell length of a numeric column; columns with longer cells are text."""


@dataclass(frozen=True)
class PageSection:
    """Section of one analysis."""

    name: str
    title: str
    text: str
    blocks: Sequence[Block]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Name of a model → reason why the analysis does not apply."""
    file: str | None = None
    """Name of the data file, next to the page."""

    @property
    def missing_reasons(self) -> list[str]:
        """Sentence for each reason, with the names of the models."""
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            names_by_reason.setdefault(reason, []).append(name)
        return [_format_reason(names, reason) for reason, names in names_by_reason.items()]

    def draw_blocks(self) -> Iterator["PageBlock"]:
        """Yield the blocks below the text, in order. Figures are drawn now."""
        for is_chart, blocks in groupby(self.blocks, key=lambda block: isinstance(block, Chart)):
            if is_chart:
                yield PageBlock(charts=cast(Sequence[Chart], list(blocks)))
            else:
                yield from map(_draw_block, cast(Iterable[str | Figure | Table], blocks))


@dataclass(frozen=True)
class PageBlock:
    """Block of the page, of one of four kinds."""

    paragraph: str | None = None
    picture: HtmlPicture | None = None
    charts: Sequence[Chart] = ()
    """Charts side by side."""
    table: HtmlTable | None = None
    summary: str | None = None
    """Summary line of a collapsed table."""


def render_analysis_page(
    title: str,
    summary: Sequence[str],
    sections: Sequence[PageSection],
    models: Table,
    facts: Mapping[str, str],
    command: str | None = None,
) -> str:
    """Render the page as an HTML string.

    Args:
        title: title of the page.
        summary: paragraphs below the title.
        sections: sections, in order.
        models: table of the analyzed models, named by their methods.
        facts: machine, software, and similar facts.
        command: command that made the page, if any.
    """
    return render_template(
        Path(__file__).parent / "templates" / "analysis.html",
        title=title,
        summary=summary,
        sections=sections,
        models=_build_html_table(models),
        environment=facts,
        reproduction=describe_reproduction([name for name, *_ in models.rows], command),
    )


def _format_reason(names: Sequence[str], reason: str) -> str:
    """Format the reason why an analysis does not apply to some models."""
    if len(names) == 1:
        return f"Does not apply to {names[0]}. {reason}"
    return f"Does not apply to {', '.join(names[:-1])} and {names[-1]}. For each: {reason[0].lower()}{reason[1:]}"


def _draw_block(block: str | Figure | Table) -> PageBlock:
    if isinstance(block, str):
        return PageBlock(paragraph=block)
    if isinstance(block, Figure):
        return PageBlock(picture=_draw_figure(block))
    summary = f"{block.caption or 'Table'} ({len(block.rows):,} rows)" if block.folded else None
    return PageBlock(table=_build_html_table(block), summary=summary)


def _draw_figure(figure: Figure) -> HtmlPicture:
    return encode_picture(figure.draw, figure.alt)


def _build_html_table(table: Table) -> HtmlTable:
    corner_header, *headers = table.columns
    is_text = [any(len(row[column]) > MIN_TEXT_LENGTH for row in table.rows) for column in range(1, len(table.columns))]
    columns = [
        HtmlColumn(header, css_class="text wide" * is_wide) for header, is_wide in zip(headers, is_text, strict=True)
    ]
    rows = [(HtmlCell(name), [HtmlCell(value) for value in values]) for name, *values in table.rows]
    return HtmlTable(corner_header, columns, rows, "facts", table.caption or "Table")
