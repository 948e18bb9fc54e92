"""Results on the console and in a folder, with lists of missing results.

A results folder contains the same records as results.json, .csv, .md, and .png, and the failed runs.

A table is complete if every method has every seed of the table at every x value. If no method has more than one seed,
or if the sweep sets `own_seeds`, methods are not expected to share seeds. A maximum length is shown in the cell
instead. Trivial baselines have no seeds.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron.reports import records as record_files
from megatron.reports import table_formats
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.leaderboard import LeaderboardReport
from megatron.reports.leaderboard_summary import build_answers
from megatron.reports.method_rows import disambiguate_methods, quote_method
from megatron.reports.records import RESULTS_FILE, Record, merge_records
from megatron.reports.run_records import RunFailure, read_failures, write_failures
from megatron.reports.table_formats import TextTable, build_rich_table, render_comparison_text
from megatron.utils.atomic_io import check_no_foreign_files, folder_lock, write_bytes_atomically, write_text_atomically

ALL_RESULTS = "all results"
"""Text for a run without any record."""

CHANGE_PHRASES = {
    "rises": "rises from {} to {}",
    "falls": "falls from {} to {}",
    "holds": "shows no significant change: {}, {}",
    "mixed": "differs between seeds: {}, {}",
}
"""Sentence fragments for each verdict, with the values at the first and the last x value."""
NEGLIGIBLE_PHRASE = "is nearly unchanged: {}, {}"
"""Sentence fragment for a change that holds because it is negligible, although its interval excludes no change."""
MAX_DESCRIBED_METHODS = 8
"""Maximum number of methods in a table with sentences."""

DERIVED_FILES = ("results.csv", "results.md", "results.png")
"""Files written next to and after `RESULTS_FILE`."""


def print_comparison_tables(
    console: Console, records: Sequence[Record], failures: Sequence[RunFailure] = (), *, own_seeds: bool = False
) -> None:
    """Print every table of the records, framed if the terminal is wide enough, else (and in pipes) as plain text.

    If there are few methods, a sentence for each follows. Missing results and failed runs are listed at the end.
    """
    tables = build_comparison_tables(records, failures)
    plain_tables, depth_maps = split_depth_maps(tables)
    for index, table in enumerate(plain_tables):
        if index > 0:
            console.print()
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
    """Describe the change of each method from the first x value of a table to the last, in table order.

    Methods without a value at one of them are skipped.
    """
    first, last = table.x_values[0], table.x_values[-1]
    sentences = []
    for method, change in table.changes.items():
        if change.verdict is None or any((method, x) not in table.cells for x in (first, last)):
            continue
        begin, end = (
            f"{table.cells[method, x].mean_text} at {table.axis.format_value_with_unit(x)}" for x in (first, last)
        )
        phrase = NEGLIGIBLE_PHRASE if change.is_negligible else CHANGE_PHRASES[change.verdict]
        size = change.format_relative(change.mean)
        sentences.append(f"{quote_method(method)} {phrase.format(begin, end)} ({size}).")
    return sentences


def print_leaderboard(console: Console, board: LeaderboardReport) -> None:
    """Print the answers and tables of a leaderboard. The page has all tables."""
    for answer in build_answers(board):
        console.print(Text(f"{answer.question}\n{' '.join(answer.sentences)}\n"), soft_wrap=True)
    for table in board.build_tables():
        console.print(Text(table.to_text()), soft_wrap=True)


def check_no_foreign_results(option: str, folder: Path) -> None:
    """Check that a folder without results.json has no files with the names of our results.

    Args:
        option: option that names the folder.

    Raises:
        UserError: it has such files.
    """
    check_no_foreign_files(
        option, [folder / name for name in DERIVED_FILES], lambda _: (folder / RESULTS_FILE).is_file()
    )


def read_saved_records(folder: Path) -> list[Record]:
    """Read the records in a results folder; empty without results.json.

    Raises:
        UserError: results.json is damaged.
    """
    path = folder / RESULTS_FILE
    return record_files.read_records(path) if path.exists() else []


def merge_into_results(
    folder: Path, records: Sequence[Record], *, same_run: bool, only_records: bool = False
) -> list[Path]:
    """Merge records into a results folder. Other processes may do so at the same time.

    The folder's records and failed runs are read and written under the folder's lock, so none are lost. A failure is
    removed if the new records contain a result of its run.

    Args:
        folder: results folder.
        records: new records.
        same_run: as for `merge_records`.
        only_records: write only results.json, because measurements are not finished.

    Returns:
        Paths of the written files.
    """
    with folder_lock(folder):
        merged = merge_records(read_saved_records(folder), records, same_run=same_run)
        if only_records:
            return [record_files.write_records(folder / RESULTS_FILE, merged)]
        failures = [
            failure for failure in read_failures(folder / RESULTS_FILE) if not any(map(failure.is_resolved_by, records))
        ]
        return _write_result_files(folder, merged, failures)


def write_results(
    folder: Path,
    records: Sequence[Record],
    run_failures: Sequence[RunFailure] = (),
    *,
    own_seeds: bool = False,
    drawn: Sequence[Record] | None = None,
) -> list[Path]:
    """Write results.json, results.csv, results.md, and results.png into a folder, each atomically.

    Failed runs are saved next to them, and appear in tables and figures.

    Args:
        folder: results folder.
        records: all records.
        run_failures: runs without records.
        own_seeds: True if each method has its own seeds, so that no method lacks a seed of another.
        drawn: records to plot, without failures; if None, all records and failures.
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
    from megatron.reports.plots import render_plots_png  # matplotlib imports slowly

    write_failures(folder / RESULTS_FILE, run_failures)
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
            render_plots_png(comparison_tables if drawn is None else build_comparison_tables(drawn)),
        ),
    ]


def build_missing_table(tables: Sequence[ComparisonTable], *, own_seeds: bool = False) -> TextTable | None:
    """Build a table of missing results with a row for each method and reason, or return None if nothing is missing.

    Args:
        own_seeds: True if each method has its own seeds, so that no method lacks a seed of another.
    """
    expected_runs = _list_expected_runs(tables, own_seeds)
    rows: dict[tuple[str, str, str], list[int]] = {}
    for method, seed in expected_runs:
        reason = next((str(failure) for table in tables for failure in table.failures if (failure.method, failure.seed)
                    == (method, seed)), "no record")  # fmt: skip
        for missing_text in _find_missing(tables, method, seed, own_seeds):
            rows.setdefault((method, missing_text, reason), []).append(seed)
    if not rows:
        return None
    return TextTable(
        title="Missing results",
        corner_header="method",
        column_headers=("seed", "missing", "reason"),
        rows=tuple(
            (method, (", ".join(map(str, seeds)), missing_text, reason))
            for (method, missing_text, reason), seeds in rows.items()
        ),
        notes=("Means, changes, and comparisons use the available seeds; n is shown if there are fewer.",)
        if any(table.max_seeds > 1 for table in tables)
        else (),
    )


def _list_expected_runs(tables: Sequence[ComparisonTable], own_seeds: bool) -> list[tuple[str, int]]:
    """List each method with every seed that its tables should have, and every failed run."""
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
    return sorted({record.seed for record in table.records if record.method not in table.trivial_baselines})


def _find_missing(tables: Sequence[ComparisonTable], method: str, seed: int, own_seeds: bool) -> list[str]:
    """List the tables and x values without results of a run, or `ALL_RESULTS` if it has none."""
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
            missing.append(f"{prefix}{'all values' if not measured_x_values[index] else x_text}")
    return missing
