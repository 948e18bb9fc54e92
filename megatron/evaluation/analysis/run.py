"""`./deepy.py analyze RUN…`: analyze trained runs and configurations, and write one page with its data.

All analyses are applied to one model after another; then the page shows the models side by side. Data are written after
each model, so that results survive a later failure.

The page is self-contained: text, charts, tables, and figures. Functions are shown as interactive charts. Maps are
images embedded as base64, in two widths, so that the page is readable on screens of 400 pixels. If an analysis does not
apply to a model, the page states the reason.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron.evaluation.analysis.analysis import (
    Analysis,
    AnalysisContext,
    Block,
    Figure,
    NotApplicable,
    Table,
    load_analyses,
)
from megatron.evaluation.analysis.jobs import (
    PAGE_FILE,
    AnalysisJob,
    AnalysisRequest,
    build_analysis_jobs,
    estimate_relative_cost,
    load_analysis_context,
    read_analysis_request,
)
from megatron.evaluation.jobs import LogFunction, RunJob, make_log_function
from megatron.evaluation.provenance import describe_machine, list_software_versions
from megatron.options.commands import AnalysisOptions
from megatron.reports.charts import Chart
from megatron.reports.html_page import (
    HtmlCell,
    HtmlColumn,
    HtmlPicture,
    HtmlTable,
    describe_reproduction,
    encode_picture,
    render_template,
)
from megatron.utils.atomic_io import FolderLock, write_page_atomically, write_text_atomically
from megatron.utils.formatting import format_quantity
from megatron.utils.progress import IMPORTING, ProgressMeter, WaitAnnouncer, WorkItem

if TYPE_CHECKING:
    from rich.console import Console

MAX_NUMBER_LENGTH = 40
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

    def draw_blocks(self) -> Iterator[PageBlock]:
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
    is_text = [
        any(len(row[column]) > MAX_NUMBER_LENGTH for row in table.rows) for column in range(1, len(table.columns))
    ]
    columns = [
        HtmlColumn(header, css_class="text wide" * is_wide) for header, is_wide in zip(headers, is_text, strict=True)
    ]
    rows = [(HtmlCell(name), [HtmlCell(value) for value in values]) for name, *values in table.rows]
    return HtmlTable(corner_header, columns, rows, "facts", table.caption or "Table")


# torch and matplotlib are imported inside functions, so that errors in the options are reported at once.

LOCK_FILE = ".analysis.lock"
LOCKED_MESSAGE = "another analysis is writing to this folder; wait for it to finish, or choose another folder"


def analyze(
    runs: Sequence[str | Path],
    options: AnalysisOptions | None = None,
    *,
    configs: Sequence[str] = (),
    output: str | Path | None = None,
    console: Console | None = None,
) -> Path:
    """Analyze models side by side.

    Args:
        runs: run folders (the latest checkpoint is used) or checkpoint folders.
        options: analysis options; the defaults if None.
        configs: untrained configurations in the format of `train`.
        output: folder for the page and its data; if None, `analysis` in a single run's folder.
        console: console for progress and file names; None is silent.

    Returns:
        Path of the page.

    Raises:
        UserError: a model cannot be analyzed; raised before any work.
        RunError: a checkpoint is damaged, or an analysis fails.
    """
    request = read_analysis_request(runs, configs, options or AnalysisOptions(), output)
    log = make_log_function(console)
    lock = FolderLock(request.folder, name=LOCK_FILE, key="--output", busy_message=LOCKED_MESSAGE, lock_timeout=0.0)
    try:
        return _write_analysis(request, console, log)
    finally:
        lock.release(remove_file=True)


def _write_analysis(request: AnalysisRequest, console: Console | None, log: LogFunction) -> Path:
    with WaitAnnouncer(log, IMPORTING):
        jobs = build_analysis_jobs(request)
    log(f"the page will be saved as {request.folder / PAGE_FILE}")
    only = request.options.only
    analyses = [
        AnalysisResults(name, analysis, request.folder)
        for name, analysis in load_analyses().items()
        if only is None or name in only
    ]
    with ProgressMeter(console, [job.work_item for job in jobs]) as meter:
        for job in jobs:
            meter.begin(job.work_item, "loading")
            context = load_analysis_context(job, request)
            done = 0.0
            for results in analyses:
                title = results.analysis.title
                work = estimate_relative_cost(results.name, request, isinstance(job, RunJob))
                meter.update(done, title)

                def report(fraction: float, done: float = done, work: float = work, title: str = title) -> None:
                    meter.update(done + fraction * work, title)

                results.measure(replace(context, progress=report))
                done += work
            del context
            meter.finish()
    page = write_page_atomically(request.folder / PAGE_FILE, _build_page(request, jobs, analyses, console))
    written = [page, *(results.file for results in analyses if results.by_model)]
    log(f"written: {', '.join(map(str, written))}")
    return page


class AnalysisResults:
    """Results of one analysis for all models, with its data file and its section of the page.

    Args:
        name, analysis: the analysis.
        folder: folder of the data file.
    """

    def __init__(self, name: str, analysis: Analysis, folder: Path) -> None:
        self.name, self.analysis = name, analysis
        self.file = folder / f"{name}.{analysis.data_format}"
        self.by_model: dict[str, Any] = {}
        """Name of a model → result."""
        self.missing: dict[str, str] = {}
        """Name of a model → reason why the analysis does not apply."""

    def measure(self, context: AnalysisContext) -> None:
        """Measure a model, and write the data of all models so far."""
        try:
            self.by_model[context.name] = self.analysis.measure(context)
        except NotApplicable as reason:
            self.missing[context.name] = str(reason)
        else:
            write_text_atomically(self.file, self._format_data())

    def _format_data(self) -> str:
        """Format the rows as CSV or JSON, with `method` as the first field."""
        rows = [
            {"method": name, **row} for name, result in self.by_model.items() for row in self.analysis.list_rows(result)
        ]
        if self.analysis.data_format == "json":
            return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def to_section(self, models: Sequence[str]) -> PageSection:
        """Build the section of the page, given the names of all models on it."""
        return PageSection(
            self.name,
            self.analysis.title,
            self.analysis.description,
            self.analysis.render_blocks(self.by_model, models) if self.by_model else [],
            self.missing,
            self.file.name if self.by_model else None,
        )


def _build_page(
    request: AnalysisRequest,
    jobs: Sequence[AnalysisJob],
    analyses: Sequence[AnalysisResults],
    console: Console | None,
) -> str:
    from megatron.reports.html_page import format_command

    names = [job.name for job in jobs]
    title = f"Attention of {', '.join(names[:4])}{' and others' * (len(names) > 4)}"
    facts = {
        "machine": describe_machine(),
        "software": list_software_versions(),
        "made at (UTC)": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    }
    sections = [results.to_section(names) for results in analyses]
    models = _build_model_table(jobs)
    drawings = WorkItem("the page", "draw", 2.0 * sum(isinstance(b, Figure) for s in sections for b in s.blocks))
    with ProgressMeter(console, [drawings]) as meter:
        meter.begin(drawings, "drawing figures")
        sections = [replace(section, blocks=_report_drawings(section.blocks, drawings, meter)) for section in sections]
        return render_analysis_page(title, _build_summary(request), sections, models, facts, format_command())


def _report_drawings(blocks: Sequence[Block], drawings: WorkItem, meter: ProgressMeter) -> list[Block]:
    """Wrap the figures in blocks so that they report when they are drawn, once for each width."""

    def report(draw: Callable[[bool], bytes], narrow: bool) -> bytes:
        drawn = draw(narrow)
        meter.update(drawings.done + 1, "drawing figures")
        return drawn

    return [
        replace(block, draw=partial(report, block.draw)) if isinstance(block, Figure) else block for block in blocks
    ]


def _build_summary(request: AnalysisRequest) -> list[str]:
    if request.inputs is None:
        return ["No text was read: these results depend on the biases only."]
    return [f"{request.inputs.description} Layers and heads are counted from 0."]


def _build_model_table(jobs: Sequence[AnalysisJob]) -> Table:
    rows = []
    for job in jobs:
        model = job.config.model
        shape = f"{model.num_layers} × {model.hidden_size}, {format_quantity(model.num_attention_heads, 'head')}"
        cells = [job.name, shape, f"{model.seq_length:,}"]
        if isinstance(job, RunJob):
            rows.append([*cells, f"{job.run.trainer_state.step:,}", f"run {job.run.name}, {job.run.checkpoint.name}"])
        else:
            rows.append([*cells, "–", "untrained configuration"])
    return Table(["method", "layers × width", "training length", "step", "source"], rows)
