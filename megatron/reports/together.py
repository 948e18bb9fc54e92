"""`./deepy.py report RESULTS…`: records of several files in one page, and what they say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron.errors import UserError
from megatron.files import check_folder, refuse_files_of_others
from megatron.reports import experiment, extrapolation, failures, records, tables
from megatron.reports.apart import contradictions, told_apart
from megatron.reports.document import is_document
from megatron.reports.experiment import Experiment
from megatron.reports.failures import Failure
from megatron.reports.judgement import judged
from megatron.reports.layout import layouts
from megatron.reports.records import RESULTS, Record
from megatron.reports.section import Section
from megatron.suggest import choose_from


def together(
    results: Sequence[Path],
    console: Console,
    *,
    output: Path | None = None,
    against: str | None = None,
    delta: float = extrapolation.DELTA,
    title: str | None = None,
) -> list[Record]:
    """Show the tables of several files, and write them into a page if one is named.

    Each experiment is a section of its own, with papers' tables beside its own; the rest is put together.

    Args:
        results: results.json files, or folders that hold one.
        console: takes the tables.
        output: the page.
        against: the method that others are compared with; an experiment's own if None.
        delta: the bound of the criterion of extrapolation.
        title: of the page.

    Raises:
        UserError: there is no such file, it holds no records, or no table has the method.
    """
    if output is not None:
        _check_page(output)
    found = {path: records.read(path) for path in _files(results)}
    known = {path: told for path in found if (told := experiment.read(path)) is not None}
    failed = {path: failures.read(path) for path in found}
    sections = _sections(found, known, failed, against, delta)
    for line in contradictions({path: each for path, each in found.items() if path not in known}):
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    for each in sections:
        if each.title is not None:
            console.print(f"\n{each.title}\n", markup=False, highlight=False, soft_wrap=True)
        tables.show(console, each.records, each.failures)
        for grid in each.grids:
            console.print(f"\n{grid.plain()}", end="", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        from megatron.reports import report  # matplotlib takes a while

        report.write(output, sections, title=title)
        console.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)
    return [record for each in sections for record in each.records]


def _check_page(output: Path) -> None:
    """Raises UserError if the page cannot be written."""
    if output.suffix not in (".html", ".htm"):
        raise UserError(f"--output {output}: is a page, and its name ends in .html")
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder")
    check_folder("--output", output.parent)
    refuse_files_of_others("--output", [output], is_document)


def _files(results: Sequence[Path]) -> list[Path]:
    """The files with records. What a sweep says of its experiment, and of runs that failed, lies beside its records and
    is read with them."""
    files = [path / RESULTS if path.is_dir() else path for path in results]
    beside = {aside for path in files for aside in (experiment.beside(path), failures.beside(path))}
    return [path for path in dict.fromkeys(files) if path not in beside]


def _sections(
    found: Mapping[Path, list[Record]],
    known: Mapping[Path, Experiment],
    failed: Mapping[Path, Sequence[Failure]],
    against: str | None,
    delta: float,
) -> list[Section]:
    """What belongs to no experiment first, all together."""
    sections = []
    rest = told_apart([record for path in found if path not in known for record in found[path]])
    lost = [each for path in found if path not in known for each in failed[path]]
    if rest:
        sections.append(Section(None, rest, judged(layouts(rest, lost), against, delta), lost))
    for path, each in known.items():
        if found[path]:
            chosen = each if against is None else replace(each, against=against)
            grids = chosen.grids(found[path], delta, failed[path])
            sections.append(Section(each.title, found[path], grids, failed[path]))
    if not sections:
        raise UserError(f"{', '.join(map(str, found))}: no results")
    methods = list(dict.fromkeys(record.method for each in sections for record in each.records))
    if against is not None and against not in methods:
        raise UserError(f"--against {against}: nothing to compare with it; {choose_from(against, methods)}")
    return sections
