"""Results on the console and in a folder, with what is missing of them.

A folder of results holds the same records as results.json, .csv, .md and .png, and runs that failed beside them.

A table is whole if every method has every seed of the table at every place of the table. Where no method has more than
one seed, or where the sweep says so (`own_seeds`), each method has its own. Positions that end before a length explain
themselves in the cell, and predictors that learned nothing have no seeds.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron.reports import failures, table_formats
from megatron.reports import records as record_files
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.failures import RunFailure
from megatron.reports.leaderboard import LeaderboardReport
from megatron.reports.leaderboard_answers import build_answers
from megatron.reports.method_rows import disambiguate_methods
from megatron.reports.records import RESULTS_FILE, Record, merge_records
from megatron.reports.table_formats import TextTable, build_rich_table, render_comparison_text
from megatron.utils.atomic_io import refuse_foreign_files, write_bytes_atomically, write_text_atomically
from megatron.utils.folder_lock import folder_lock

ALL_RESULTS = "everything"
"""What is missing of a run without any record."""

CHANGE_PHRASES = {
    "rises": "rises from {} to {}",
    "falls": "falls from {} to {}",
    "holds": "holds: {}, {}",
    "mixed": "rises or falls, as the seed is: {}, {}",
}
"""A verdict in a sentence, with the values at the first and the last place."""
MAX_DESCRIBED_METHODS = 8
"""A table of more has no sentences."""

DERIVED_FILES = ("results.csv", "results.md", "results.png")
"""What is written beside `RESULTS_FILE`, and after it."""


def print_comparison_tables(
    console: Console, records: Sequence[Record], failures: Sequence[RunFailure] = (), *, own_seeds: bool = False
) -> None:
    """Print every table of the records: framed where the terminal is wide enough, else (and in pipes) as plain text.

    Of few methods a sentence for each follows. What they lack is listed below them, runs that failed among it.
    """
    tables = build_comparison_tables(records, failures)
    plain_tables, depth_maps = split_depth_maps(tables)
    for table in plain_tables:
        rendered = build_rich_table(table)
        unlimited = console.options.update(max_width=1 << 20)
        if console.is_terminal and console.measure(rendered, options=unlimited).maximum <= console.width:
            console.print(rendered)
        else:
            console.print(Text(render_comparison_text(table)), soft_wrap=True, end="")
        if len(table.changes) <= MAX_DESCRIBED_METHODS:
            for sentence in describe_changes(table):
                console.print(Text(sentence), soft_wrap=True)
    for depth_map in depth_maps:
        console.print(Text(f"\n{depth_map.build_text_table().to_text()}"), soft_wrap=True, end="")
    missing_table = build_missing_table(tables, own_seeds=own_seeds)
    if missing_table is not None:
        console.print(Text(f"\n{missing_table.to_text()}"), soft_wrap=True, end="")


def describe_changes(table: ComparisonTable) -> list[str]:
    """Describe what each method does from the first place of a table to the last, in the order of the table.

    Methods without a number at one of the two have no sentence.
    """
    first, last = table.x_values[0], table.x_values[-1]
    sentences = []
    for method, change in table.changes.items():
        if change.verdict is None or any((method, x) not in table.cells for x in (first, last)):
            continue
        begin, end = (
            f"{table.cells[method, x].mean_text} at {table.axis.format_value_with_unit(x)}" for x in (first, last)
        )
        size = change.format_relative(change.mean)
        sentences.append(f"{method} {CHANGE_PHRASES[change.verdict].format(begin, end)} ({size}).")
    return sentences


def print_leaderboard(console: Console, board: LeaderboardReport) -> None:
    """Print what a leaderboard says in place of all tables, which are on the page."""
    for answer in build_answers(board):
        console.print(Text(f"{answer.question}\n{' '.join(answer.sentences)}\n"), soft_wrap=True)
    for table in board.build_tables():
        console.print(Text(table.to_text()), soft_wrap=True)


def check_no_foreign_results(option: str, folder: Path) -> None:
    """Refuse a folder with files by these names that stand beside no results.json, and so are none of ours.

    option: what named the folder. Raises UserError.
    """
    refuse_foreign_files(option, [folder / name for name in DERIVED_FILES], lambda _: (folder / RESULTS_FILE).is_file())


def read_saved_records(folder: Path) -> list[Record]:
    """Return the records in a folder of results, or none without results.json. Raises UserError if that is damaged."""
    path = folder / RESULTS_FILE
    return record_files.read_records(path) if path.exists() else []


def merge_into_results(
    folder: Path, records: Sequence[Record], *, same_run: bool, only_records: bool = False
) -> list[Path]:
    """Merge records into those of a folder, which other processes may do at the same time.

    The folder's records are read just before they are written, both under the folder's lock, so none is lost.

    Args:
        folder: the folder of results.
        records: new ones.
        same_run: as for `merge_records`.
        only_records: write results.json alone, until all is measured.

    Returns:
        The files that were written.
    """
    with folder_lock(folder):
        merged = merge_records(read_saved_records(folder), records, same_run=same_run)
        if only_records:
            return [record_files.write_records(folder / RESULTS_FILE, merged)]
        return _write_result_files(folder, merged)


def write_results(
    folder: Path,
    records: Sequence[Record],
    run_failures: Sequence[RunFailure] = (),
    *,
    own_seeds: bool = False,
    drawn: Sequence[Record] | None = None,
) -> list[Path]:
    """Write results.json, results.csv, results.md and results.png into a folder, each whole or not at all.

    Runs that failed are written beside them, and stand in tables and pictures as such.

    Args:
        folder: where to.
        records: all of them.
        run_failures: of runs that have none.
        own_seeds: each method has seeds of its own, so that it lacks none that another has.
        drawn: the records that the picture shows, without failures; all of them, and failures, if None.
    """
    with folder_lock(folder):
        return _write_result_files(folder, records, run_failures, own_seeds=own_seeds, drawn=drawn)


def _write_result_files(
    folder: Path,
    records: Sequence[Record],
    run_failures: Sequence[RunFailure] = (),
    *,
    own_seeds: bool = False,
    drawn: Sequence[Record] | None = None,
) -> list[Path]:
    from megatron.reports.plots import render_plots_png  # matplotlib takes a while

    failures.write_failures(folder / RESULTS_FILE, run_failures)
    comparison_tables = build_comparison_tables(records, run_failures)
    missing_table = build_missing_table(comparison_tables, own_seeds=own_seeds)
    plain_tables, depth_maps = split_depth_maps(comparison_tables)
    return [
        record_files.write_records(folder / RESULTS_FILE, records),
        record_files.write_records_csv(folder / DERIVED_FILES[0], disambiguate_methods(records)),
        write_text_atomically(
            folder / DERIVED_FILES[1],
            "\n".join(
                [
                    *map(table_formats.render_comparison_markdown, plain_tables),
                    *(depth_map.build_text_table().to_markdown() for depth_map in depth_maps),
                    *([missing_table.to_markdown()] if missing_table else []),
                ]
            ),
        ),
        write_bytes_atomically(
            folder / DERIVED_FILES[2],
            render_plots_png(records, failures=run_failures) if drawn is None else render_plots_png(drawn),
        ),
    ]


def build_missing_table(tables: Sequence[ComparisonTable], *, own_seeds: bool = False) -> TextTable | None:
    """A list of what tables of the same records lack, a row for all that a method lacks alike; None if all is there.

    own_seeds: each method has seeds of its own, so that it lacks none that another has.
    """
    expected_runs = _list_expected_runs(tables, own_seeds)
    rows: dict[tuple[str, str, str], list[int]] = {}
    for method, seed in expected_runs:
        reason = next((str(failure) for table in tables for failure in table.failures if (failure.method, failure.seed)
                    == (method, seed)), "no record of it")  # fmt: skip
        for missing_text in _find_missing(tables, method, seed, own_seeds):
            rows.setdefault((method, missing_text, reason), []).append(seed)
    if not rows:
        return None
    return TextTable(
        title="What is missing",
        corner_header="method",
        column_headers=("seed", "what", "why"),
        rows=tuple(
            (method, (", ".join(map(str, seeds)), missing_text, reason))
            for (method, missing_text, reason), seeds in rows.items()
        ),
        notes=("Means, changes and comparisons are over the seeds that are there; where these are fewer, n says so.",)
        if any(table.max_seeds > 1 for table in tables)
        else (),
    )


def _list_expected_runs(tables: Sequence[ComparisonTable], own_seeds: bool) -> list[tuple[str, int]]:
    """Every method with every seed that a table of it should have, and every run that failed."""
    expected: dict[tuple[str, int], None] = {}
    for table in tables:
        for method in table.methods:
            if method not in table.trivial_baselines:
                failed_seeds = [failure.seed for failure in table.failures if failure.method == method]
                measured_seeds = [record.seed for record in table.records if record.method == method]
                seeds = (
                    _list_seeds(table) if measured_seeds and table.max_seeds > 1 and not own_seeds else measured_seeds
                )
                expected |= dict.fromkeys((method, seed) for seed in (*seeds, *failed_seeds))
    return sorted(expected, key=lambda run: list(dict.fromkeys(method for method, _ in expected)).index(run[0]))


def _list_seeds(table: ComparisonTable) -> list[int]:
    """That a table has of any method."""
    return sorted({record.seed for record in table.records if record.method not in table.trivial_baselines})


def _find_missing(tables: Sequence[ComparisonTable], method: str, seed: int, own_seeds: bool) -> list[str]:
    """What tables lack of a run: the tables and places; `ALL_RESULTS` if they have nothing of it."""
    method_tables = [table for table in tables if method in table.methods]
    measured_x_values = {
        index: {record.x_value for record in table.records if (record.method, record.seed) == (method, seed)}
        for index, table in enumerate(method_tables)
    }
    if not any(measured_x_values.values()):
        return [ALL_RESULTS]
    missing = []
    for index, table in enumerate(method_tables):
        has_failed = any((failure.method, failure.seed) == (method, seed) for failure in table.failures)
        if seed not in _list_seeds(table) and not has_failed:
            continue
        if own_seeds and not measured_x_values[index] and not has_failed:
            continue
        missing_x_values = [
            x for x in table.x_values if x not in measured_x_values[index] and not table.ends_before(method, x)
        ]
        if missing_x_values:
            x_text = ", ".join(map(table.axis.format_value, missing_x_values)) + (
                " tokens" if table.axis.in_tokens else ""
            )
            prefix = "" if len(method_tables) == 1 else f"{table.title}: "
            missing.append(f"{prefix}{'all of it' if not measured_x_values[index] else x_text}")
    return missing
