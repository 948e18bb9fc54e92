"""One self-contained page of all analyses: text, tables and pictures, with nothing that must lie beside it.

Pictures are embedded as base64, each in two widths, so that the page reads well on 400 pixels too. What an analysis has
nothing to say of stands there in words.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.analysis.analysis import Block, Figure, Table
from megatron.reports import html_tables
from megatron.reports.html_page import embed_picture, render_environment, render_page
from megatron.reports.html_tables import HtmlCell, HtmlColumn

_STYLE = """
.facts td { white-space: nowrap; } .facts .text { white-space: normal; }
@media (max-width: 56rem) { .facts td { white-space: normal; } }"""

PROSE = 40
"""Characters from which on the cells of a column are text and not numbers."""


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


def render_analysis_page(
    title: str, summary: Sequence[str], parts: Sequence[PageSection], models: Table, facts: Mapping[str, str]
) -> str:
    """The page as a string of HTML.

    Args:
        summary: paragraphs under the title.
        parts: in order.
        models: a table of the models that were looked at.
        facts: machine, software and the like.
    """
    links = "".join(f'<li><a href="#{part.name}">{html.escape(part.title)}</a></li>' for part in parts)
    sections = [
        *map(_render_paragraph, summary),
        f"<ul>{links}</ul>" if len(parts) > 1 else "",
        *map(_render_section, parts),
        "<h2>Models</h2>",
        _render_table(models),
        render_environment(facts),
    ]
    return render_page(title, sections, _STYLE)


def _render_section(part: PageSection) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in part.missing.items():
        by_reason.setdefault(reason, []).append(name)
    missing = [_render_paragraph(_render_reason(names, reason)) for reason, names in by_reason.items()]
    data = f'<p><small>Data: <a href="{part.file}">{part.file}</a></small></p>' if part.file else ""
    blocks = [_render_block(block) for block in part.blocks]
    head = f'<h2 id="{part.name}">{html.escape(part.title)}</h2>'
    return "\n".join([head, _render_paragraph(part.text), *missing, *blocks, data])


def _render_reason(names: Sequence[str], reason: str) -> str:
    """That an analysis has nothing to say of some models, and why."""
    if len(names) == 1:
        return f"Does not apply to {names[0]}. {reason}"
    return f"Does not apply to {', '.join(names[:-1])} and {names[-1]}. Of each: {reason[0].lower()}{reason[1:]}"


def _render_block(block: Block) -> str:
    if isinstance(block, str):
        return _render_paragraph(block)
    return _render_table(block) if isinstance(block, Table) else _render_figure(block)


def _render_paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _render_figure(picture: Figure) -> str:
    return embed_picture(picture.draw, picture.alt)


def _render_table(table: Table) -> str:
    corner, *heads = table.columns
    prose = [any(len(row[place]) > PROSE for row in table.rows) for place in range(1, len(table.columns))]
    columns = [HtmlColumn(head, css_class="text wide" * wide) for head, wide in zip(heads, prose, strict=True)]
    rows = [(html.escape(name), [HtmlCell(html.escape(value)) for value in values]) for name, *values in table.rows]
    shown = html_tables.render_html_table(
        corner, columns, rows, css_class="facts", caption="" if table.folded else table.caption
    )
    if not table.folded:
        return shown
    title = html.escape(table.caption) or "Table"
    return f"<details><summary>{title} ({len(table.rows):,} rows)</summary>{shown}</details>"
