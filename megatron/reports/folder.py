"""A folder of results: the same records as results.json, .csv, .md and .png, and runs that failed beside them."""

from collections.abc import Sequence
from pathlib import Path

from megatron.files import write_bytes, write_text
from megatron.reports import failures, missing, tables
from megatron.reports import records as record_files
from megatron.reports.failures import Failure
from megatron.reports.layout import layouts
from megatron.reports.records import RESULTS, Record


def write_results(folder: Path, records: Sequence[Record], failed: Sequence[Failure] = ()) -> list[Path]:
    """Write results.json, results.csv, results.md and results.png into a folder, each whole or not at all.

    Runs that failed are written beside them, and stand in tables and pictures as such.
    """
    from megatron.reports.plots import png  # matplotlib takes a while

    failures.write(folder / RESULTS, failed)
    groups = layouts(records, failed)
    absent = missing.grid(groups)
    return [
        record_files.write(folder / RESULTS, records),
        record_files.write_csv(folder / "results.csv", records),
        write_text(
            folder / "results.md", "\n".join([*map(tables.markdown, groups), *([absent.markdown()] if absent else [])])
        ),
        write_bytes(folder / "results.png", png(records, failures=failed)),
    ]
