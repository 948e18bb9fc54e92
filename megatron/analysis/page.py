"""One self-contained page of all analyses: text, charts, tables and pictures, with nothing that must lie beside it.

Functions are charts that answer the pointer. Maps are pictures, embedded as base64, each in two widths, so that the
page reads well on 400 pixels too. What an analysis has nothing to say of stands there in words.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import cast

from megatron.analysis.analysis import Block, Figure, Table
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
"""Columns with a longer cell hold text and not numbers."""


@dataclass(frozen=True)
class PageSection:
    """An analysis on the page."""

    name: str
    title: str
    text: str
    blocks: Sequence[Block]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Name of a model → why the analysis has nothing to say of it."""
    file: str | None = None
    """Where its data lie, beside the page."""

    @property
    def missing_reasons(self) -> list[str]:
        """A sentence for each reason, which names all models that it holds for."""
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            names_by_reason.setdefault(reason, []).append(name)
        return [_format_reason(names, reason) for reason, names in names_by_reason.items()]

    def draw_blocks(self) -> Iterator["PageBlock"]:
        """What stands under the text, in order; pictures are drawn now."""
        for is_chart, blocks in groupby(self.blocks, key=lambda block: isinstance(block, Chart)):
            if is_chart:
                yield PageBlock(charts=cast(Sequence[Chart], list(blocks)))
            else:
                yield from map(_draw_block, cast(Iterable[str | Figure | Table], blocks))


@dataclass(frozen=True)
class PageBlock:
    """One of four things on the page."""

    paragraph: str | None = None
    picture: HtmlPicture | None = None
    charts: Sequence[Chart] = ()
    """Side by side."""
    table: HtmlTable | None = None
    summary: str | None = None
    """Of a table that is shown when this is clicked on."""


def render_analysis_page(
    title: str,
    summary: Sequence[str],
    sections: Sequence[PageSection],
    models: Table,
    facts: Mapping[str, str],
    command: str | None = None,
) -> str:
    """The page as a string of HTML.

    Args:
        summary: paragraphs under the title.
        sections: in order.
        models: a table of the models that were analysed, which it names by their methods.
        facts: machine, software and the like.
        command: that made the page, if one did.
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
    """That an analysis has nothing to say of some models, and why."""
    if len(names) == 1:
        return f"Does not apply to {names[0]}. {reason}"
    return f"Does not apply to {', '.join(names[:-1])} and {names[-1]}. Of each: {reason[0].lower()}{reason[1:]}"


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
