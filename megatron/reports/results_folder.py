"""A folder of results: the same records as results.json, .csv, .md and .png, and runs that failed beside them."""

from collections.abc import Sequence
from pathlib import Path

from megatron.reports import failures, missing_results, table_formats
from megatron.reports import records as record_files
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.failures import RunFailure
from megatron.reports.records import RESULTS_FILE, Record
from megatron.utils.atomic_io import refuse_foreign_files, write_bytes_atomically, write_text_atomically

DERIVED_FILES = ("results.csv", "results.md", "results.png")
"""What is written beside `RESULTS_FILE`, and after it."""


def check_no_foreign_results(option: str, folder: Path) -> None:
    """Refuse a folder with files by these names that stand beside no results.json, and so are none of ours.

    option: what named the folder. Raises UserError.
    """
    refuse_foreign_files(option, [folder / name for name in DERIVED_FILES], lambda _: (folder / RESULTS_FILE).is_file())


def write_results(folder: Path, records: Sequence[Record], run_failures: Sequence[RunFailure] = ()) -> list[Path]:
    """Write results.json, results.csv, results.md and results.png into a folder, each whole or not at all.

    Runs that failed are written beside them, and stand in tables and pictures as such.
    """
    from megatron.reports.plots import render_plots_png  # matplotlib takes a while

    failures.write_failures(folder / RESULTS_FILE, run_failures)
    comparison_tables = build_comparison_tables(records, run_failures)
    missing_table = missing_results.build_missing_table(comparison_tables)
    return [
        record_files.write_records(folder / RESULTS_FILE, records),
        record_files.write_records_csv(folder / DERIVED_FILES[0], records),
        write_text_atomically(
            folder / DERIVED_FILES[1],
            "\n".join(
                [
                    *map(table_formats.render_comparison_markdown, comparison_tables),
                    *([missing_table.to_markdown()] if missing_table else []),
                ]
            ),
        ),
        write_bytes_atomically(folder / DERIVED_FILES[2], render_plots_png(records, failures=run_failures)),
    ]
