"""`./deepy.py report RESULTS…`: combine the records of several files in one page.

Files may use one name for different runs; `method_rows.py` distinguishes their trainings. If several files contain the
same measurement of a model, the last file takes precedence.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron.reports import paper_experiment, records, report, report_markdown, results_output
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.html_page import format_command, is_generated_page
from megatron.reports.method_rows import get_table_key
from megatron.reports.paper_experiment import Experiment
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.report import ReportSection
from megatron.reports.report_markdown import is_generated_markdown
from megatron.reports.run_records import (
    SavedRuns,
    get_failures_path,
    is_run_file,
    read_failures,
    read_run_file,
    read_run_folder,
)
from megatron.reports.verdict_tables import DEFAULT_MAX_CHANGE, build_verdict_tables
from megatron.utils.atomic_io import (
    check_new_file,
    check_no_foreign_files,
    write_bytes_atomically,
    write_page_atomically,
)
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

MARKDOWN_SUFFIX, LATEX_SUFFIX = ".md", ".tex"
FIGURE_SUFFIXES = (".pdf", ".svg")
MAX_SHOWN = 4
"""Maximum number of files or folders that a message names."""
DEFAULT_FIGURE_WIDTH, DEFAULT_FIGURE_FONT = 3.25, 8.0
"""Width in inches and font size in points of a figure for a column of a page."""


def combine_results(
    result_paths: Sequence[Path],
    console: Console,
    *,
    output: Path | None = None,
    against: str | None = None,
    max_change: float = DEFAULT_MAX_CHANGE,
    title: str | None = None,
    figure: Path | None = None,
    figure_width: float | None = None,
    figure_font: float | None = None,
) -> list[Record]:
    """Print the tables of several files, and write a page if `output` is given.

    Each experiment is a section of its own, with the published tables next to ours. All other results share a section.

    Args:
        result_paths: results.json files, folders that contain one, or folders of saved records (`sweep.records`).
        console: console for the tables.
        output: HTML page, Markdown file, or LaTeX file to write.
        against: method to compare with; that of each experiment if None.
        max_change: bound of the extrapolation criterion.
        title: title of the page.
        figure: PDF or SVG file to write for a paper; further comparable groups of results become NAME_2 and so on.
        figure_width: width of the figures in inches.
        figure_font: font size of the figures in points.

    Raises:
        UserError: a file is missing or contains no records, or no table has the method.
    """
    if figure is None and (figure_width, figure_font) != (None, None):
        name = "--figure-font" if figure_width is None else "--figure-width"
        raise UserError(f"{name}: needs --figure FILE.pdf or FILE.svg")
    if title is not None and (output is None or output.suffix == LATEX_SUFFIX):
        raise UserError(f"--title {title}: needs --output FILE.html or FILE.md")
    if output is not None:
        _check_output_page(output)
    if figure is not None:
        _check_figure(figure)
    records_by_path, saved_runs = read_result_files(result_paths)
    experiments = _read_experiments(records_by_path)
    sections = _build_sections(records_by_path, experiments, saved_runs, against, max_change)
    if output is not None and output.suffix == MARKDOWN_SUFFIX:
        report_markdown.check_pictures("--output", output, sections)
    figures = {} if figure is None else _render_figures(figure, sections, figure_width, figure_font)
    for message in (
        *describe_ignored_runs(saved_runs),
        *find_contradictions({path: section for path, section in records_by_path.items() if path not in experiments}),
    ):
        console.print(f"note: {message}", markup=False, highlight=False, soft_wrap=True)
    for path in result_paths:
        page = path.parent / f"{path.name}{MARKDOWN_SUFFIX}"
        if path.name and path.is_dir() and page != output and page.is_file() and is_generated_markdown(page):
            console.print(
                f"note: the published page of {path} is {page}", markup=False, highlight=False, soft_wrap=True
            )
    for section in sections:
        if section.title is not None:
            title_line = f"{section.title}{report.describe_pending_runs([section])}"
            console.print(f"\n{title_line}\n", markup=False, highlight=False, soft_wrap=True)
        if section.board is not None:
            results_output.print_leaderboard(console, section.board)
            continue
        results_output.print_comparison_tables(console, section.records, section.failures, own_seeds=section.own_seeds)
        for text_table in section.text_tables:
            console.print(f"\n{text_table.to_text()}", end="", markup=False, highlight=False, soft_wrap=True)
    if output is not None and output.suffix == MARKDOWN_SUFFIX:
        report_markdown.write_markdown_report(output, sections, title)
        pictures = [path for path in report_markdown.list_markdown_files(output, sections) if path.exists()]
        console.print(f"written: {', '.join(map(str, pictures))}", markup=False, highlight=False, soft_wrap=True)
    elif output is not None and output.suffix == LATEX_SUFFIX:
        write_page_atomically(output, report.render_report_latex(sections, output.stem))
        console.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)
    elif output is not None:
        write_page_atomically(output, report.render_report(sections, title=title, command=format_command()))
        console.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)
    for path, (description, content) in figures.items():
        write_bytes_atomically(path, content)
        console.print(f"written: {path} ({description})", markup=False, highlight=False, soft_wrap=True)
    return [record for section in sections for record in section.records]


def build_sections(
    result_paths: Sequence[Path],
    against: str | None = None,
    max_change: float = DEFAULT_MAX_CHANGE,
    *,
    is_complete: bool = True,
) -> list[ReportSection]:
    """Build the sections of a page. For arguments and errors see `combine_results`.

    Args:
        is_complete: False if more results will follow; the method to compare with may then be missing.
    """
    records_by_path, saved_runs = read_result_files(result_paths)
    if not is_complete and against not in {record.method for found in records_by_path.values() for record in found}:
        against = None
    experiments = _read_experiments(records_by_path)
    return _build_sections(records_by_path, experiments, saved_runs, against, max_change)


def _read_experiments(paths: Iterable[Path]) -> dict[Path, Experiment]:
    found = {path: paper_experiment.read_experiment(path) for path in paths}
    return {path: experiment for path, experiment in found.items() if experiment is not None}


def _check_output_page(output: Path) -> None:
    """Check that the page can be written.

    Raises:
        UserError: the format is unknown, or the page would overwrite another file.
    """
    checks = {
        ".html": is_generated_page,
        ".htm": is_generated_page,
        MARKDOWN_SUFFIX: is_generated_markdown,
        LATEX_SUFFIX: report.is_generated_latex,
    }
    if output.suffix not in checks:
        existing = f"; results.csv is already next to {RESULTS_FILE}" if output.suffix == ".csv" else ""
        raise UserError(
            f"--output {output}: it must be a name ending in .html, .htm, {MARKDOWN_SUFFIX}, or "
            f"{LATEX_SUFFIX}{existing}"
        )
    check_new_file("--output", output)
    check_no_foreign_files("--output", [output], checks[output.suffix])


def _check_figure(figure: Path) -> None:
    """Check that the folder of the figures exists and that their format is known. Raises UserError otherwise."""
    if figure.suffix not in FIGURE_SUFFIXES:
        suffixes = " or ".join(FIGURE_SUFFIXES)
        raise UserError(f"--figure {figure}: it must be a name ending in {suffixes}, the formats of vector graphics")
    check_new_file("--figure", figure)


def _render_figures(
    figure: Path, sections: Sequence[ReportSection], width: float | None, font_size: float | None
) -> dict[Path, tuple[str, bytes]]:
    """Render the figures of all sections, and check that no other file has the name of one.

    Returns:
        A description and the content of each file.
    """
    from megatron.reports import paper_figure  # importing matplotlib is slow

    panels = []
    for section in sections:
        failures = section.failures if section.board is None else ()
        panels += paper_figure.list_panels(section.shown_records, failures)
    names = [figure, *(figure.with_stem(f"{figure.stem}_{number}") for number in range(2, len(panels) + 1))]
    check_no_foreign_files("--figure", names, paper_figure.is_generated_figure)
    sizes = {"width": width or DEFAULT_FIGURE_WIDTH, "font_size": font_size or DEFAULT_FIGURE_FONT}
    return {
        path: (panel.title, paper_figure.render_paper_figure(panel, figure.suffix, **sizes))
        for path, panel in zip(names, panels, strict=True)
    }


def read_result_files(result_paths: Sequence[Path]) -> tuple[dict[Path, list[Record]], dict[Path, SavedRuns]]:
    """Read the records of files and folders. A folder has results.json, or a file for each run (`run_records.py`).

    Companion files (experiment, failed runs) are read with their records.

    Raises:
        UserError: a file cannot be read, or a folder contains no records or several results.

    Returns:
        Records by file; for a folder with a file for each run, by the results.json that it would have. Then the saved
        runs of such folders.
    """
    found: dict[Path, list[Record]] = {}
    saved_runs: dict[Path, SavedRuns] = {}
    for path in result_paths:
        file = path / RESULTS_FILE if path.is_dir() else path
        if path.is_dir() and not file.exists():
            saved_runs[file] = saved = read_saved_runs(path)
            found[file] = saved.records
        else:
            outcome = read_run_file(file) if is_run_file(file) else None
            found[file] = [] if outcome is None else outcome.records
    companion_files = {
        companion
        for file in found
        for companion in (paper_experiment.get_experiment_path(file), get_failures_path(file))
    }
    records_by_path = {
        file: known if file in saved_runs else known or records.read_records(file)
        for file, known in found.items()
        if file not in companion_files
    }
    return records_by_path, saved_runs


def read_saved_runs(folder: Path) -> SavedRuns:
    """Read the records of a folder with a file for each run.

    Raises:
        UserError: the folder contains no records, or several results.
    """
    experiment = paper_experiment.read_experiment(folder / RESULTS_FILE)
    if experiment is None and (others := _list_results_below(folder)):
        shown = ", ".join(map(str, others[:MAX_SHOWN])) + (" …" if len(others) > MAX_SHOWN else "")
        raise UserError(f"{folder}: contains {len(others)} results; name those to report, for example {shown}")
    saved = read_run_folder(folder, None if experiment is None else experiment.run_digests)
    if saved.records or saved.failures:
        return saved
    if saved.ignored_files:
        raise UserError(f"{folder}: all saved runs are of variants that its sweep has removed or redefined")
    raise UserError(
        f"{folder}: no {RESULTS_FILE} and no records of runs found; `./deepy.py evaluate RUN… --output FOLDER` and "
        "sweeps write them"
    )


def _list_results_below(folder: Path) -> list[Path]:
    """List the results in a folder that has none of its own: files of records, and folders that a report can read."""
    companions = (paper_experiment.get_experiment_path(Path(RESULTS_FILE)).name, RESULTS_FILE)
    folders = {path.parent for name in companions for path in folder.rglob(name)}
    files = [path for path in folder.glob("*.json") if _has_records(path)]
    return [*sorted(folders), *sorted(files)]


def _has_records(path: Path) -> bool:
    try:
        return bool(records.read_records(path))
    except UserError:
        return False


def describe_ignored_runs(saved_runs: Mapping[Path, SavedRuns]) -> Iterator[str]:
    """Yield a note for each folder with saved records that do not belong to its sweep any more."""
    for path, saved in saved_runs.items():
        if files := saved.ignored_files:
            shown = ", ".join(str(file.relative_to(path.parent)) for file in files[:MAX_SHOWN])
            more = " …" if len(files) > MAX_SHOWN else ""
            yield f"{path.parent}: ignoring {len(files)} saved runs of removed or redefined variants: {shown}{more}"


def _build_sections(
    records_by_path: Mapping[Path, list[Record]],
    experiments: Mapping[Path, Experiment],
    saved_runs: Mapping[Path, SavedRuns],
    against: str | None,
    max_change: float,
) -> list[ReportSection]:
    """Build the sections, starting with one for all results that belong to no experiment."""
    failures_by_path = {
        path: saved_runs[path].failures if path in saved_runs else read_failures(path) for path in records_by_path
    }
    sections = []
    other_records = [record for path in records_by_path if path not in experiments for record in records_by_path[path]]
    other_failures = [item for path in records_by_path if path not in experiments for item in failures_by_path[path]]
    if other_records:
        sections.append(
            ReportSection(
                None,
                other_records,
                build_verdict_tables(
                    split_depth_maps(build_comparison_tables(other_records, other_failures))[0], against, max_change
                ),
                other_failures,
            )
        )
    for path, item in experiments.items():
        if records_by_path[path]:
            selected_experiment = item if against is None else replace(item, against=against)
            text_tables = selected_experiment.build_tables(records_by_path[path], max_change, failures_by_path[path])
            sections.append(
                ReportSection(
                    item.title,
                    records_by_path[path],
                    text_tables,
                    failures_by_path[path],
                    item.own_seeds,
                    selected_experiment.get_leaderboard(),
                    max(0, (item.num_runs or 0) - saved_runs[path].num_runs) if path in saved_runs else 0,
                )
            )
    if not sections:
        raise UserError(f"{', '.join(map(str, records_by_path))}: no records found")
    methods = list(dict.fromkeys(record.method for item in sections for record in item.records))
    if against is not None and against not in methods:
        raise UserError(f"--against {against}: unknown method; {format_choices(against, methods)}")
    return sections


def find_contradictions(records_by_path: Mapping[Path, Sequence[Record]]) -> Iterator[str]:
    """Yield notes about files whose values differ from those of an earlier file for the same runs."""
    latest: dict[tuple[Hashable, ...], tuple[Path, float]] = {}
    for path, file_records in records_by_path.items():
        conflict_counts: dict[Path, int] = {}
        for record in file_records:
            model = record.method, record.seed, record.run, record.step, record.training_digest
            key = (get_table_key(record), record.x_value, *model)
            previous = latest.get(key)
            if previous is not None and previous[1] != record.value and previous[0] != path:
                conflict_counts[previous[0]] = conflict_counts.get(previous[0], 0) + 1
            latest[key] = (path, record.value)
        for other_path, count in conflict_counts.items():
            count_text = "1 value differs" if count == 1 else f"{count} values differ"
            yield f"{path}: {count_text} from {other_path} for the same runs; using this file"
