"""Self-contained `report.html`: charts, tables, measurement protocols, models, and configurations.

The page needs no network and no other files, and is complete without scripts. Charts are inline SVG (`charts.py`), and
downloads are embedded. All numbers come from records; `templates/report.html` defines the layout. Configurations are
optional because records do not contain them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.reports.charts import Chart
from megatron.reports.comparison_table import (
    ComparisonTable,
    build_comparison_tables,
    select_curve_tables,
)
from megatron.reports.context_gain import build_gain_tables
from megatron.reports.curve_chart import build_curve_chart
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.html_page import (
    TEMPLATES_FOLDER,
    Download,
    HtmlCell,
    HtmlColumn,
    HtmlTable,
    describe_reproduction,
    render_template,
)
from megatron.reports.leaderboard import Leaderboard, LeaderboardReport
from megatron.reports.leaderboard_summary import build_answers, build_cost_chart
from megatron.reports.method_rows import disambiguate_methods
from megatron.reports.records import Record, format_records_csv
from megatron.reports.report_sentences import (
    build_title,
    describe_environment,
    describe_measurements,
    describe_plots,
    summarize_table,
)
from megatron.reports.results_output import build_missing_table
from megatron.reports.run_records import RunFailure
from megatron.reports.table_formats import LATEX_MARKER, TextTable, build_html_table, render_latex_file
from megatron.utils.errors import UserError


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
    num_pending_runs: int = 0
    """Number of runs without records, which the heading of the page states."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", disambiguate_methods(self.records))

    @cached_property
    def tables(self) -> list[ComparisonTable]:
        """Comparison tables of the records and failures."""
        return build_comparison_tables(self.records, self.failures)

    @cached_property
    def board(self) -> LeaderboardReport | None:
        """Contents of the leaderboard, or None if the section has none."""
        return None if self.leaderboard is None else LeaderboardReport(self.leaderboard, self.tables)

    @cached_property
    def shown_records(self) -> Sequence[Record]:
        """Records for figures: all, or those of a leaderboard's best methods and trivial baselines."""
        if self.board is None:
            return self.records
        order = {method: index for index, method in enumerate(self.board.list_shown_methods())}
        drawn = [record for record in self.records if record.method in order or record.is_trivial_baseline]
        return sorted(drawn, key=lambda record: order.get(record.method, len(order)))


@dataclass(frozen=True)
class TrainingSection:
    """Training progress of the runs of a page."""

    table: TextTable
    """Table with a row for each run."""
    charts: Sequence[Chart] = ()
    is_live: bool = False
    """True if a run is still training. The section is then shown before the results, otherwise after them."""


def render_report(
    sections: Sequence[ReportSection],
    *,
    title: str | None = None,
    configurations: Mapping[str, str] | None = None,
    command: str | None = None,
    training: TrainingSection | None = None,
    refresh_seconds: int | None = None,
) -> str:
    """Render the report as an HTML page.

    Args:
        sections: sections, in order.
        title: heading of the page; if None, the title of its only section, or a generated description.
        configurations: name → text of a configuration file, shown collapsed at the end.
        command: command that made the page, for reproduction.
        training: training progress of the runs.
        refresh_seconds: refresh interval of a served page; None for a file.

    Raises:
        UserError: there is nothing to show.
    """
    records = [record for section in sections for record in section.records]
    if not records and training is None:
        raise UserError("no records to report")
    tables = [table for section in sections for table in section.tables]
    metrics = list(dict.fromkeys(table.metric for table in tables))
    definitions = " ".join(f"{metric.definition} {metric.better.capitalize()} is better." for metric in metrics)
    if title is None and not sections:
        title = "Trainings"
    elif title is None:
        title = build_title(tables) if len(sections) > 1 or sections[0].title is None else sections[0].title
    return render_template(
        TEMPLATES_FOLDER / "report.html",
        title=title + describe_pending_runs(sections),
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
        measurements=describe_measurements(tables),
        models=_build_models_table(records),
        environment=describe_environment(records),
        configurations=configurations or {},
        definitions=definitions,
    )


def describe_pending_runs(sections: Sequence[ReportSection]) -> str:
    """Return the suffix of a page's title with the number of runs without records, or an empty string."""
    count = sum(section.num_pending_runs for section in sections)
    return f" ({count} run{'s' * (count > 1)} pending)" if count else ""


def get_section_title(section: ReportSection) -> str:
    """Return the title of a section, or a generated description of its metrics, methods, and lengths."""
    return build_title(build_comparison_tables(section.records)) if section.title is None else section.title


def render_report_latex(sections: Sequence[ReportSection], name: str) -> str:
    """Render all tables of a report as LaTeX, with labels that begin with `name`."""
    tables: list[tuple[str | None, ComparisonTable | TextTable]] = []
    for section in sections:
        plain_tables, depth_maps = split_depth_maps(section.tables)
        map_tables = [depth_map.build_text_table() for depth_map in depth_maps]
        board_tables = () if section.board is None else section.board.build_tables()
        found = (*board_tables, *plain_tables, *map_tables, *section.text_tables)
        tables += [(section.title, table) for table in found]
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
    board = section.board
    tables, depth_maps = split_depth_maps(section.tables)
    shown_maps = {shown.title: shown for shown in split_depth_maps(build_comparison_tables(section.shown_records))[1]}
    shown_methods = None if board is None else board.list_shown_methods()
    drawn_tables = select_curve_tables(tables)
    return {
        "title": get_section_title(section),
        "answers": [] if board is None else build_answers(board),
        "board_tables": [] if board is None else [table.to_html() for table in board.build_tables()],
        "cost_chart": None if board is None else build_cost_chart(board, f"{name}-costs"),
        "summary": " ".join(summarize_table(table) for table in tables) if board is None else None,
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
        "context_charts": [
            build_curve_chart(table, f"{name}-context-{index}", describe_plots([table]), shown_methods)
            for index, table in enumerate(build_gain_tables(tables), start=1)
        ],
        "missing_table": None if missing_table is None else missing_table.to_html(),
        "text_tables": [text_table.to_html() for text_table in section.text_tables],
    }


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


def _format_optional(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
