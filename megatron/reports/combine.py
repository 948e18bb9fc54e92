"""`./deepy.py report RESULTS…`: records of several files in one page, and what they say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron.reports import experiment, extrapolation, failures, records, table_formats
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.disambiguate import disambiguate_methods, find_contradictions
from megatron.reports.experiment import Experiment
from megatron.reports.failures import RunFailure
from megatron.reports.html_page import is_generated_page
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.section import ReportSection
from megatron.reports.verdict_tables import build_verdict_tables
from megatron.utils.atomic_io import check_folder, refuse_foreign_files
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices


def combine_results(
    result_paths: Sequence[Path],
    console: Console,
    *,
    output: Path | None = None,
    against: str | None = None,
    delta: float = extrapolation.DEFAULT_DELTA,
    title: str | None = None,
) -> list[Record]:
    """Show the tables of several files, and write them into a page if one is named.

    Each experiment is a section of its own, with papers' tables beside its own; the rest is put together.

    Args:
        result_paths: results.json files, or folders that hold one.
        console: takes the tables.
        output: the page.
        against: the method that others are compared with; an experiment's own if None.
        delta: the bound of the criterion of extrapolation.
        title: of the page.

    Raises:
        UserError: there is no such file, it holds no records, or no table has the method.
    """
    if output is not None:
        _check_output_page(output)
    records_by_path = {path: records.read_records(path) for path in _list_result_files(result_paths)}
    experiments = {
        path: file_experiment
        for path in records_by_path
        if (file_experiment := experiment.read_experiment(path)) is not None
    }
    failures_by_path = {path: failures.read_failures(path) for path in records_by_path}
    sections = _build_sections(records_by_path, experiments, failures_by_path, against, delta)
    for message in find_contradictions(
        {path: section for path, section in records_by_path.items() if path not in experiments}
    ):
        console.print(f"note: {message}", markup=False, highlight=False, soft_wrap=True)
    for section in sections:
        if section.title is not None:
            console.print(f"\n{section.title}\n", markup=False, highlight=False, soft_wrap=True)
        table_formats.print_comparison_tables(console, section.records, section.failures)
        for text_table in section.text_tables:
            console.print(f"\n{text_table.to_text()}", end="", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        from megatron.reports import report  # matplotlib takes a while

        report.write_report(output, sections, title=title)
        console.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)
    return [record for section in sections for record in section.records]


def _check_output_page(output: Path) -> None:
    """Raises UserError if the page cannot be written."""
    if output.suffix not in (".html", ".htm"):
        raise UserError(f"--output {output}: is a page, and its name ends in .html")
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder")
    check_folder("--output", output.parent)
    refuse_foreign_files("--output", [output], is_generated_page)


def _list_result_files(result_paths: Sequence[Path]) -> list[Path]:
    """The files with records. What a sweep says of its experiment, and of runs that failed, lies beside its records and
    is read with them."""
    files = [path / RESULTS_FILE if path.is_dir() else path for path in result_paths]
    companion_files = {
        companion
        for path in files
        for companion in (experiment.get_experiment_path(path), failures.get_failures_path(path))
    }
    return [path for path in dict.fromkeys(files) if path not in companion_files]


def _build_sections(
    records_by_path: Mapping[Path, list[Record]],
    experiments: Mapping[Path, Experiment],
    failures_by_path: Mapping[Path, Sequence[RunFailure]],
    against: str | None,
    delta: float,
) -> list[ReportSection]:
    """What belongs to no experiment first, all together."""
    sections = []
    other_records = disambiguate_methods(
        [record for path in records_by_path if path not in experiments for record in records_by_path[path]]
    )
    other_failures = [item for path in records_by_path if path not in experiments for item in failures_by_path[path]]
    if other_records:
        sections.append(
            ReportSection(
                None,
                other_records,
                build_verdict_tables(build_comparison_tables(other_records, other_failures), against, delta),
                other_failures,
            )
        )
    for path, item in experiments.items():
        if records_by_path[path]:
            selected_experiment = item if against is None else replace(item, against=against)
            text_tables = selected_experiment.build_tables(records_by_path[path], delta, failures_by_path[path])
            sections.append(ReportSection(item.title, records_by_path[path], text_tables, failures_by_path[path]))
    if not sections:
        raise UserError(f"{', '.join(map(str, records_by_path))}: no results")
    methods = list(dict.fromkeys(record.method for item in sections for record in item.records))
    if against is not None and against not in methods:
        raise UserError(f"--against {against}: nothing to compare with it; {format_choices(against, methods)}")
    return sections
