"""Self-contained `report.html`: charts, tables, measurement protocols, models, and configurations.

The page needs no network and no other files, and is complete without scripts. Charts are inline SVG (`charts.py`), and
downloads are embedded. All numbers come from records; `templates/report.html` defines the layout. Configurations are
optional because records do not contain them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

from megatron.reports.axes import format_multiple
from megatron.reports.charts import Chart, build_curve_chart
from megatron.reports.citation import describe_reproduction
from megatron.reports.comparison_table import (
    ComparisonTable,
    build_comparison_tables,
    format_partial_seeds,
    select_curve_tables,
)
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.html_page import (
    TEMPLATES_FOLDER,
    Download,
    HtmlCell,
    HtmlColumn,
    HtmlTable,
    render_template,
)
from megatron.reports.latex_tables import LATEX_MARKER, render_latex_file
from megatron.reports.leaderboard import Leaderboard, LeaderboardReport
from megatron.reports.leaderboard_summary import build_answers, build_cost_chart
from megatron.reports.method_rows import disambiguate_methods
from megatron.reports.records import Record, RunFailure, format_records_csv
from megatron.reports.results_output import build_missing_table
from megatron.reports.table_formats import TextTable, build_html_table
from megatron.utils.atomic_io import write_page_atomically
from megatron.utils.errors import UserError

MAX_NAMED_METHODS = 4
"""Maximum number of methods that a title names; more are counted."""

MAX_DESCRIBED_CURVES = 9
"""Maximum number of curves that a summary or an alternative text describes; of more, the best and the worst."""

"""First line of every LaTeX file with tables."""

_PROTOCOL_DESCRIPTIONS = {
    "last": (
        "Only the last $targets tokens of each window are scored. Windows of all lengths end at the same "
        "${windows}positions of the text, so every length predicts the same $tokens tokens and differs only in "
        "context."
    ),
    "strided": (
        "Windows begin $targets tokens apart, and the last $targets tokens of each are scored: every token of a span "
        "of the text once, each with almost a full window of context."
    ),
    "nonoverlapping": (
        "One span of the text is divided into windows without overlap, and every token is scored. The span is a "
        "multiple of every length, so every length predicts the same $tokens tokens; early tokens of a window have "
        "little context."
    ),
    "overlapping": (
        "One span of the text is divided into overlapping windows, and every token with at least $min_context tokens "
        "of context is scored. The span is a multiple of the scored tokens of every length, so every length predicts "
        "the same $tokens tokens."
    ),
    "depths": (
        "At each depth and length all methods are evaluated on the same ${windows}sequences of the task, whose answer "
        "is at that depth. Intervals are percentile bootstraps over sequences; those of a length are for its mean "
        "over depths."
    ),
    "task": (
        "At each input length all methods are evaluated on the same ${windows}new sequences, drawn with a fixed seed; "
        "intervals are percentile bootstraps over sequences, drawn independently at each length. Rows that begin with "
        "floor are trivial baselines."
    ),
}


@dataclass(frozen=True)
class ReportSection:
    """Section of a report: records shown together, with tables derived from them."""

    title: str | None
    """Title; None if the section is the whole page or contains results without an experiment."""
    records: Sequence[Record]
    text_tables: Sequence[TextTable] = ()
    """Additional tables, shown below those of the records."""
    failures: Sequence[RunFailure] = ()
    """Runs without records."""
    own_seeds: bool = False
    """True if each method has its own seeds (`Experiment.own_seeds`)."""
    leaderboard: Leaderboard | None = None
    """Leaderboard shown first; figures then contain only the best methods."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", disambiguate_methods(self.records))

    @cached_property
    def tables(self) -> list[ComparisonTable]:
        """Comparison tables of the records and failures."""
        return build_comparison_tables(self.records, self.failures)


@dataclass(frozen=True)
class TrainingSection:
    """Training progress of the runs of a page."""

    table: TextTable
    """Table with a row for each run."""
    charts: Sequence[Chart] = ()
    is_live: bool = False
    """True if a run is still training. The section is then shown before the results, otherwise after them."""


def write_report(
    path: str | Path,
    sections: Sequence[ReportSection],
    *,
    title: str | None = None,
    num_pending_runs: int = 0,
    configurations: Mapping[str, str] | None = None,
    command: str | None = None,
    training: TrainingSection | None = None,
) -> Path:
    """Write the report as an HTML file.

    Args:
        path: path of the HTML file.
        sections: sections, in order.
        title: heading of the page; if None, the title of its only section, or a generated description.
        num_pending_runs: number of unfinished runs, shown in the heading.
        configurations: name → text of a configuration file, shown collapsed at the end.
        command: command that made the page, for reproduction.
        training: training progress of the runs.

    Raises:
        UserError: there is nothing to show.
    """
    text = render_report(
        sections, title=title, num_pending_runs=num_pending_runs, configurations=configurations, command=command,
        training=training,
    )  # fmt: skip
    return write_page_atomically(path, text)


def render_report(
    sections: Sequence[ReportSection],
    *,
    title: str | None = None,
    num_pending_runs: int = 0,
    configurations: Mapping[str, str] | None = None,
    command: str | None = None,
    training: TrainingSection | None = None,
    refresh_seconds: int | None = None,
) -> str:
    """Render the report as an HTML string. For arguments and errors see `write_report`.

    Args:
        refresh_seconds: refresh interval of a served page; None for a file.
    """
    records = [record for section in sections for record in section.records]
    if not records and training is None:
        raise UserError("no records to report")
    tables = [table for section in sections for table in section.tables]
    metrics = list(dict.fromkeys(table.metric for table in tables))
    pending_text = f" ({num_pending_runs} run{'s' * (num_pending_runs > 1)} pending)" if num_pending_runs else ""
    definitions = " ".join(f"{metric.definition} {metric.better.capitalize()} is better." for metric in metrics)
    if title is None and not sections:
        title = "Trainings"
    elif title is None:
        title = _build_title(tables) if len(sections) > 1 or sections[0].title is None else sections[0].title
    return render_template(
        TEMPLATES_FOLDER / "report.html",
        title=title + pending_text,
        sections=[_describe_section(section, f"figure-{index}") for index, section in enumerate(sections, start=1)],
        training=training,
        training_table=None if training is None else training.table.to_html(),
        refresh_seconds=refresh_seconds,
        downloads=[
            Download("results.csv", format_records_csv(records), "all records"),
            Download("tables.tex", render_report_latex(sections, "tables"), "tables in LaTeX, with booktabs"),
        ]
        if records
        else [],
        reproduction=describe_reproduction([record.position or record.method for record in records], command),
        measurements=describe_measurements(sections),
        models=_build_models_table(records),
        environment=describe_environment(sections),
        configurations=configurations or {},
        definitions=definitions,
    )


def get_section_title(section: ReportSection) -> str:
    """Return the title of a section, or a generated description of its metrics, methods, and lengths."""
    return _build_title(build_comparison_tables(section.records)) if section.title is None else section.title


def render_report_latex(sections: Sequence[ReportSection], name: str) -> str:
    """Render all tables of a report as LaTeX, with labels that begin with `name`."""
    tables: list[ComparisonTable | TextTable] = []
    for section in sections:
        board = build_leaderboard_report(section)
        tables += () if board is None else board.build_tables()
        plain_tables, depth_maps = split_depth_maps(section.tables)
        tables += [*plain_tables, *(depth_map.build_text_table() for depth_map in depth_maps), *section.text_tables]
    return render_latex_file(tables, name)


def is_generated_latex(path: Path) -> bool:
    """Return True if a file is a LaTeX file of ours."""
    return path.is_file() and path.read_bytes().startswith(LATEX_MARKER.encode())


def _describe_section(section: ReportSection, name: str) -> dict[str, Any]:
    """Return the template variables of a section: title, summary, charts, and tables.

    Args:
        name: prefix of the names of its charts.
    """
    missing_table = build_missing_table(section.tables, own_seeds=section.own_seeds)
    board = build_leaderboard_report(section)
    tables, depth_maps = split_depth_maps(section.tables)
    shown_records = select_shown_records(section, board)
    shown_maps = {shown.title: shown for shown in split_depth_maps(build_comparison_tables(shown_records))[1]}
    shown_methods = None if board is None else board.list_shown_methods()
    drawn_tables = select_curve_tables(tables)
    return {
        "title": get_section_title(section),
        "answers": [] if board is None else build_answers(board),
        "board_tables": [] if board is None else [table.to_html() for table in board.build_tables()],
        "cost_chart": None if board is None else build_cost_chart(board, f"{name}-costs"),
        "summary": " ".join(_summarize_table(table) for table in tables) if board is None else None,
        "tables": [
            (
                build_curve_chart(table, f"{name}-{index}", describe_plots([table]), shown_methods)
                if table in drawn_tables
                else None,
                build_html_table(table),
            )
            for index, table in enumerate(tables, start=1)
        ],
        "depth_maps": [
            {
                "title": shown.title,
                "alt_text": shown.describe(),
                "maps": shown.list_html_maps(),
                "lengths": [f"{length:,}" for length in shown.lengths],
                "depths": [f"{depth:.0%}" for depth in shown.depths],
                "scale": [shown.metric.format_tick(value) for value in shown.scale],
                "is_higher_better": shown.metric.better == "higher",
                "table": whole.build_html_table(),
            }
            for whole in depth_maps
            for shown in [shown_maps.get(whole.title, whole)]
        ],
        "missing_table": None if missing_table is None else missing_table.to_html(),
        "text_tables": [text_table.to_html() for text_table in section.text_tables],
    }


def build_leaderboard_report(section: ReportSection) -> LeaderboardReport | None:
    """Build the leaderboard of a section from its records, or return None if it has none."""
    if section.leaderboard is None:
        return None
    return LeaderboardReport(section.leaderboard, section.tables)


def select_shown_records(section: ReportSection, board: LeaderboardReport | None) -> Sequence[Record]:
    """Select the records for figures: all, or those of a leaderboard's best methods and trivial baselines."""
    if board is None:
        return section.records
    order = {method: index for index, method in enumerate(board.list_shown_methods())}
    drawn = [record for record in section.records if record.method in order or record.is_trivial_baseline]
    return sorted(drawn, key=lambda record: order.get(record.method, len(order)))


def describe_plots(tables: Sequence[ComparisonTable]) -> str:
    """Describe the plots of tables for screen readers: each panel with its curves."""
    return " ".join(_describe_plot(table) for table in tables)


def _describe_plot(table: ComparisonTable) -> str:
    """Describe each curve by its first and last value, best first. Of many describe only the best and the worst."""
    axis, metric = table.axis, table.metric
    curves = []
    for method in table.methods:
        x_values = [x for x in table.x_values if (method, x) in table.cells]
        if not x_values:
            continue
        first, last = table.cells[method, x_values[0]], table.cells[method, x_values[-1]]
        end_note = (
            ""
            if x_values[-1] == table.x_values[-1]
            else f" at {axis.format_value_with_unit(x_values[-1])}, where it ends"
        )
        start = "" if len(x_values) == 1 else f"{first.mean_text} to "
        curves.append((metric.get_sort_key(last.mean), f"{method} {start}{last.mean_text}{end_note}"))
    ordered = _shorten_list([text for _, text in sorted(curves)])
    x_range = axis.format_value_with_unit(table.x_values[0])
    if len(table.x_values) > 1:
        x_range = f"{axis.format_value(table.x_values[0])} to {axis.format_value_with_unit(table.x_values[-1])}"
    y_description = metric.axis_label + table.title.removeprefix(metric.title_with_unit)
    return f"Plot of {y_description}, over {axis.inline_name} {x_range}: {'; '.join(ordered)}."


def _shorten_list(texts: Sequence[str]) -> Sequence[str]:
    if len(texts) <= MAX_DESCRIBED_CURVES:
        return texts
    num_left_out = len(texts) - MAX_DESCRIBED_CURVES
    return [*texts[: MAX_DESCRIBED_CURVES - 1], f"{num_left_out} others between", texts[-1]]


def _build_title(tables: Sequence[ComparisonTable]) -> str:
    """Build a title from metrics, methods, and lengths, independent of the folder's name."""
    trivial_baselines = {method for table in tables for method in table.trivial_baselines}
    methods = [name for name in dict.fromkeys(method for table in tables for method in table.methods)
               if name not in trivial_baselines] or list(trivial_baselines)  # fmt: skip
    method_text = describe_methods(methods, MAX_NAMED_METHODS)
    metric_text = join_words(list(dict.fromkeys(table.metric.title for table in tables)))
    lengths = sorted({record.length for table in tables for record in table.records})
    train_lengths = sorted({table.train_length for table in tables})
    length_range = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
    return (
        f"{metric_text} of {method_text} at {length_range} tokens, trained at "
        f"{join_words([f'{length:,}' for length in train_lengths])} tokens"
    )


def describe_methods(methods: Sequence[str], max_named: int) -> str:
    """Join method names, or return their number if there are more than `max_named`."""
    return f"{len(methods)} methods" if len(methods) > max_named else join_words(methods)


def join_words(words: Sequence[str]) -> str:
    """Join words as in: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _summarize_table(table: ComparisonTable) -> str:
    """Describe the ranking at the last x value, and the change of each method from the first one."""
    metric, axis, first_x, last_x = table.metric, table.axis, table.x_values[0], table.x_values[-1]
    last_cells = [(cell, method) for method in table.methods if (cell := table.cells.get((method, last_x))) is not None]
    parts = []
    for cell, method in sorted(
        last_cells, key=lambda cell_and_method: (metric.get_sort_key(cell_and_method[0].mean), cell_and_method[1])
    ):
        change = None if first_x == last_x else table.compute_change(method, first_x, last_x)
        change_text = ""
        if change is not None:
            reported_change = table.changes.get(method)
            verdict = (
                "" if reported_change is None or reported_change.verdict is None else f", {reported_change.verdict}"
            )
            size = change.format_relative(change.mean)
            change_text = f" ({size} from {axis.format_value_with_unit(first_x)}{verdict})"
        parts.append(f"{method} {cell.mean_text}{format_partial_seeds(cell.partial_num_seeds)}{change_text}")
    x_text = (
        axis.format_value_with_unit(last_x)
        if axis.name == "length"
        else f"{axis.inline_name} {axis.format_value_with_unit(last_x)}"
    )
    multiple_text = f"{format_multiple(last_x / table.train_length)}, " if axis.in_tokens else ""
    at_text = "over the lengths" if metric.length_summary else f"at {x_text}"
    return (
        f"Trained at {table.train_length:,} tokens; {metric.axis_label} {at_text} "
        f"({multiple_text}{table.protocol_description}): "
        f"{', '.join(_shorten_list(parts))}."
    )


def describe_measurements(sections: Sequence[ReportSection]) -> list[str]:
    """Describe each protocol and everything measured with it."""
    by_protocol: dict[str, list[ComparisonTable]] = {}
    for section in sections:
        for table in section.tables:
            by_protocol.setdefault(table.protocol, []).append(table)
    return [_describe_protocol(protocol, tables) for protocol, tables in by_protocol.items()]


def _describe_protocol(protocol: str, tables: Sequence[ComparisonTable]) -> str:
    """Describe the scored tokens, the texts, and the meaning of bars and intervals in these tables."""
    firsts = [table.records[0] for table in tables]
    windows = _join_counts([record.windows for record in firsts])
    facts = {
        "targets": _join_counts([record.targets for record in firsts]) or "few",
        "windows": windows and f"{windows} ",
        "min_context": _join_counts([record.length - record.targets + 1 for record in firsts if record.targets]),
        # Records at positions inside windows have fewer tokens than records of lengths.
        "tokens": _join_counts([record.tokens for record in firsts if record.place is None]),
    }
    parts = [f"Protocol {protocol}.", Template(_PROTOCOL_DESCRIPTIONS.get(protocol, "")).safe_substitute(facts)]
    byte_texts = {record.dataset for record in firsts if record.bits_per_byte is not None}
    texts = list(dict.fromkeys(
        _describe_text(record.dataset, record.tokenizer, record.dataset in byte_texts)
        for record in firsts if record.dataset
    ))  # fmt: skip
    if texts:
        parts.append(f"Text{'s' * (len(texts) > 1)}: {'; '.join(texts)}.")
    several = _join_counts([table.max_seeds for table in tables if table.max_seeds > 1])
    single = [table for table in tables if table.max_seeds == 1]
    has_bars = any(entry.stderr is not None for table in single for entry in table.records)
    if several:
        where = "With several seeds, cells" if has_bars else "Cells"
        parts.append(
            f"{where} are arithmetic means over {several} seeds, or over n seeds where shown, with their standard "
            "deviation, and bars span the seeds."
        )
    if has_bars:
        where = "With one seed, bars" if several else "Bars"
        parts.append(
            f"{where} are 95% intervals over windows of text. All methods and lengths share the text, so differences "
            "between them are more certain than the bars suggest."
        )
    has_changes = any(entry.change_low is not None for table in tables for entry in table.records)
    if has_changes and protocol not in ("depths", "task"):  # these protocols mention sequences in their own sentences
        parts.append(
            "Intervals are percentile bootstraps over windows. Those of a change use the same windows at both "
            "lengths, so that the difficulty of a window cancels."
        )
    return " ".join(filter(None, parts))


def _join_counts(counts: Sequence[int | None]) -> str:
    """Join distinct counts in ascending order: 2,048 or 4,096; empty if unknown."""
    texts = [f"{count:,}" for count in sorted({count for count in counts if count is not None})]
    return " or ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _describe_text(dataset: str, tokenizer: str | None, is_bytes: bool) -> str:
    """Describe the source of the tokens, and their unit."""
    notes = [f"tokenizer {tokenizer}"] if tokenizer else []
    notes += ["one token is one byte"] if is_bytes else []
    return f"{dataset} ({', '.join(notes)})" if notes else dataset


def _build_models_table(records: Sequence[Record]) -> HtmlTable:
    columns = [HtmlColumn(header) for header in ("parameters", "seed", "steps", "tokens trained on")]
    columns.append(HtmlColumn("run, and its scoring", css_class="text wide"))
    rows: dict[tuple[str, int, str | None], tuple[HtmlCell, list[HtmlCell]]] = {}
    by_run: dict[tuple[str, int, str | None], list[Record]] = {}
    for record in records:
        by_run.setdefault((record.method, record.seed, record.run), []).append(record)
    for identity, run_records in by_run.items():
        record, seconds = run_records[0], sum(entry.seconds or 0.0 for entry in run_records)
        duration = f"{seconds:,.1f} s" if seconds else None
        scoring = ", ".join(part for part in (record.backend, record.dtype, duration) if part)
        values = (
            _format_optional(record.parameters),
            str(record.seed),
            _format_optional(record.step),
            _format_optional(record.train_tokens),
        )
        position = None if record.position == record.method else record.position
        run_cell = HtmlCell(record.run or "–", scoring)
        rows[identity] = HtmlCell(record.method, position), [*map(HtmlCell, values), run_cell]
    return HtmlTable("method", columns, list(rows.values()), "facts", "Models, one per row")


def describe_environment(sections: Sequence[ReportSection]) -> dict[str, str]:
    """Describe machine, device, software, and dates, each once."""
    records = [record for section in sections for record in section.records]
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


def _format_optional(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
