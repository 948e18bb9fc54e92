"""One self-contained `report.html`: plot, tables, what was measured, on which models, with which configurations.

It needs no network, no script and no file beside it: the plot is embedded as base64. Every number comes from the
records; every text that is not ours is escaped. Configurations are optional because records do not hold them.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from megatron.errors import UserError
from megatron.files import write_text
from megatron.reports import plots
from megatron.reports.axes import multiple
from megatron.reports.document import document, machine_and_software
from megatron.reports.html_tables import Cell, Column, table
from megatron.reports.layout import Layout, count_note, layouts
from megatron.reports.missing import grid as missing_grid
from megatron.reports.pictures import embedded
from megatron.reports.records import Record
from megatron.reports.section import Section
from megatron.reports.tables import html_table

NAMED = 4
"""Methods that a title names; more are counted."""

CURVES = 9
"""Of which a picture's alternative text tells the course; of more, the best and the worst."""

_PROTOCOLS = {
    "last": (
        "Only the last $targets tokens of each window are scored. Windows of all lengths end at the same "
        "${windows}places of the text, so every length predicts the same $tokens tokens and differs in the context "
        "before them alone."
    ),
    "strided": (
        "Windows follow each other by $targets tokens, and the last $targets tokens of each are scored: every token of "
        "a span of the text once, each with almost a whole window before it."
    ),
    "nonoverlapping": (
        "One span of the text is cut into windows that do not overlap, and every token is scored. The span is a "
        "multiple of every length, so every length predicts the same $tokens tokens; early ones in a window have "
        "little context."
    ),
    "task": (
        "At each length of the input all methods are asked the same ${windows}fresh sequences, from a fixed seed; "
        "intervals are percentile bootstraps over sequences, drawn independently at each length. Rows that begin with "
        "floor learned nothing of the input."
    ),
}


def write(
    path: str | Path,
    sections: Sequence[Section],
    *,
    title: str | None = None,
    missing: int = 0,
    configurations: Mapping[str, str] | None = None,
) -> Path:
    """Write the report.

    Args:
        path: the HTML file.
        sections: what to show, under each other.
        title: heading of the page; if None, that of its only section, or what is shown of which methods at which
            lengths.
        missing: runs that are still to come, which the heading says.
        configurations: name → text of a configuration file, shown folded at the end.

    Raises:
        UserError: there are no records.
    """
    return write_text(path, render(sections, title=title, missing=missing, configurations=configurations))


def render(
    sections: Sequence[Section],
    *,
    title: str | None = None,
    missing: int = 0,
    configurations: Mapping[str, str] | None = None,
) -> str:
    """The report as a string of HTML; arguments as for `write`."""
    records = [record for each in sections for record in each.records]
    if not records:
        raise UserError("no records to report")
    groups = [layout for each in sections for layout in layouts(each.records, each.failures)]
    metrics = list(dict.fromkeys(layout.metric for layout in groups))
    to_come = f" ({missing} run{'s' * (missing > 1)} to come)" if missing else ""
    defined = " ".join(f"{metric.definition} {metric.better.capitalize()} is better." for metric in metrics)
    several = len(sections) > 1
    if title is None:
        title = _title(groups) if several or sections[0].title is None else sections[0].title
    parts = [
        *([_contents(sections)] if several else []),
        *(part for number, each in enumerate(sections) for part in _results(each, number, headed=several)),
        "<h2>What was measured</h2>",
        *dict.fromkeys(f"<p>{_measured(layout)}</p>" for layout in groups),
        "<h2>Models</h2>",
        _models(records),
        machine_and_software(_facts(records)),
        _configurations(configurations or {}),
        f"<footer>{html.escape(defined)}</footer>",
    ]
    return document(title + to_come, parts)


def _contents(sections: Sequence[Section]) -> str:
    """Links to the sections."""
    items = "".join(
        f'<li><a href="#section-{number}">{html.escape(_heading(each))}</a></li>'
        for number, each in enumerate(sections)
    )
    return f"<ul>{items}</ul>"


def _heading(section: Section) -> str:
    return _title(layouts(section.records)) if section.title is None else section.title


def _results(section: Section, number: int, *, headed: bool) -> list[str]:
    """A section's summary, picture and tables."""
    groups = layouts(section.records, section.failures)
    says = [] if headed or not section.grids else ["<h2>What it says</h2>"]
    absent = missing_grid(groups)
    lacks = [] if absent is None else [*([] if headed else ["<h2>What is missing</h2>"]), absent.html()]
    return [
        *([f'<h2 id="section-{number}">{html.escape(_heading(section))}</h2>'] if headed else []),
        f"<p>{' '.join(html.escape(_summary(layout)) for layout in groups)}</p>",
        embedded(lambda narrow: plots.png(section.records, narrow=narrow, failures=section.failures), alt_text(groups)),
        *(html_table(layout) for layout in groups),
        *lacks,
        *says,
        *(each.html() for each in section.grids),
    ]


def alt_text(groups: Sequence[Layout]) -> str:
    """What a picture of tables shows, for those who do not see it: each panel, and how its curves run."""
    return " ".join(_panel(layout) for layout in groups)


def _panel(layout: Layout) -> str:
    """Each curve from its first place to its last, the best end first; of many the best and the worst alone."""
    axis, metric = layout.axis, layout.metric
    curves = []
    for method in layout.methods:
        places = [place for place in layout.places if (method, place) in layout.cells]
        if not places:
            continue
        first, last = layout.cells[method, places[0]], layout.cells[method, places[-1]]
        short = "" if places[-1] == layout.places[-1] else f" at {axis.told(places[-1])}, where it ends"
        start = "" if len(places) == 1 else f"{first.number} to "
        curves.append((metric.rank(last.mean), f"{method} {start}{last.number}{short}"))
    ordered = [text for _, text in sorted(curves)]
    if len(ordered) > CURVES:
        ordered = [*ordered[: CURVES - 1], f"{len(ordered) - CURVES} others between", ordered[-1]]
    span = axis.told(layout.places[0])
    if len(layout.places) > 1:
        span = f"{axis.shown(layout.places[0])} to {axis.told(layout.places[-1])}"
    what = metric.axis + layout.title.removeprefix(metric.heading)
    return f"Plot of {what}, over {axis.name} {span}: {'; '.join(ordered)}."


def _title(groups: Sequence[Layout]) -> str:
    """What is measured, of which methods, at which lengths: the same words whatever the folder is called."""
    floors = {method for layout in groups for method in layout.floors}
    methods = [each for each in dict.fromkeys(method for layout in groups for method in layout.methods)
               if each not in floors] or list(floors)  # fmt: skip
    named = f"{len(methods)} methods" if len(methods) > NAMED else _listed(methods)
    measured = _listed(list(dict.fromkeys(layout.metric.title for layout in groups)))
    lengths = sorted({record.length for layout in groups for record in layout.records})
    trained = sorted({layout.train_length for layout in groups})
    span = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
    return f"{measured} of {named} at {span} tokens, trained at {_listed([f'{length:,}' for length in trained])}"


def _listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _summary(layout: Layout) -> str:
    """The result in words: the ranking at the last place, and how far each is from its own start: beyond chance?"""
    metric, axis, first, last = layout.metric, layout.axis, layout.places[0], layout.places[-1]
    ends = [(cell, method) for method in layout.methods if (cell := layout.cells.get((method, last))) is not None]
    parts = []
    for cell, method in sorted(ends, key=lambda end: (metric.rank(end[0].mean), end[1])):
        change = None if first == last else layout.change(method, first, last)
        told = ""
        if change is not None:
            known = layout.changes.get(method)
            verdict = "" if known is None or known.verdict is None else f", {known.verdict}"
            distance = metric.shown_distance(change.mean, change.spread if change.interval else None)
            told = f" ({distance} from {axis.told(first)}{verdict})"
        parts.append(f"{method} {cell.number}{count_note(cell.few)}{told}")
    where = axis.told(last) if axis.name == "length" else f"{axis.name} {axis.told(last)}"
    times = f"{multiple(last / layout.train_length)}, " if axis.tokens else ""
    return (
        f"Trained at {layout.train_length:,} tokens; {metric.axis} at {where} ({times}{layout.how}): "
        f"{', '.join(parts)}."
    )


def _measured(layout: Layout) -> str:
    record = layout.records[0]
    facts = {
        "targets": "few" if record.targets is None else f"{record.targets:,}",
        "windows": "" if record.windows is None else f"{record.windows:,} ",
        "tokens": f"{record.tokens:,}",
    }
    explained = Template(_PROTOCOLS.get(layout.protocol, "")).safe_substitute(facts)
    text = f"Protocol {layout.protocol}. {explained}"
    if record.dataset:
        text += f" Text: {record.dataset}"
        text += f" (tokenizer {record.tokenizer})." if record.tokenizer else "."
    if record.bits_per_byte is not None:
        text += " One token is one byte."
    if layout.repeats > 1:
        text += (
            f" Cells are arithmetic means over {layout.repeats} seeds, or as many as their n says, with their standard "
            "deviation; bars span the seeds."
        )
    elif any(entry.stderr is not None for entry in layout.records):
        text += (
            " Bars are 95% intervals over windows of text; all methods and lengths share the text, so differences "
            "between them are known better than the bars suggest."
        )
    if record.protocol != "task" and any(entry.change_low is not None for entry in layout.records):
        text += (
            " Intervals are percentile bootstraps over windows; those of a change draw the same windows at both "
            "lengths, so that what makes a window hard at every length cancels."
        )
    return html.escape(text)


def _models(records: Sequence[Record]) -> str:
    """One row per trained model."""
    columns = [Column(head) for head in ("parameters", "seed", "steps", "tokens trained on")]
    columns.append(Column("run, and how it was scored", kind="text wide"))
    rows: dict[tuple[str, int, str | None], tuple[str, list[Cell]]] = {}
    for record in records:
        identity = (record.method, record.seed, record.run)
        if identity in rows:
            continue
        same = [entry for entry in records if (entry.method, entry.seed, entry.run) == identity]
        seconds = sum(entry.seconds or 0.0 for entry in same)
        took = f"{seconds:,.1f} s" if seconds else None
        scoring = ", ".join(part for part in (record.backend, record.dtype, took) if part)
        values = (_known(record.parameters), str(record.seed), _known(record.step), _known(record.train_tokens))
        run = f"{html.escape(record.run or '–')}<small>{html.escape(scoring)}</small>"
        position = "" if record.position in (None, record.method) else f"<small>{html.escape(record.position)}</small>"
        rows[identity] = f"{html.escape(record.method)}{position}", [*map(Cell, values), Cell(run)]
    return table("method", columns, list(rows.values()))


def _facts(records: Sequence[Record]) -> dict[str, str]:
    """Machine, device, software and dates, each named once."""
    columns = {
        "machine": [record.machine for record in records],
        "scored on": [record.device for record in records],
        "software": [record.software for record in records],
        "scored at (UTC)": [record.date for record in records],
    }
    facts = {}
    for name, values in columns.items():
        distinct = sorted({value for value in values if value})
        if name == "scored at (UTC)" and len(distinct) > 2:
            distinct = [f"{distinct[0]} to {distinct[-1]}"]
        facts[name] = "; ".join(distinct) if distinct else "not recorded"
    return facts


def _configurations(configurations: Mapping[str, str]) -> str:
    if not configurations:
        return ""
    parts = [
        f"<details><summary><code>{html.escape(name)}</code></summary><pre>{html.escape(text)}</pre></details>"
        for name, text in configurations.items()
    ]
    return "<h2>Configurations</h2>\n" + "\n".join(parts)


def _known(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
