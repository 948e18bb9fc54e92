"""A folder of results: the same records as results.json, .csv, .md and .png, and runs that failed beside them."""

from collections.abc import Sequence
from pathlib import Path

from megatron.files import refuse_files_of_others, write_bytes, write_text
from megatron.reports import failures, missing, tables
from megatron.reports import records as record_files
from megatron.reports.failures import Failure
from megatron.reports.layout import layouts
from megatron.reports.records import RESULTS, Record

OTHERS = ("results.csv", "results.md", "results.png")
"""What is written beside `RESULTS`, and after it."""


def refuse_results_of_others(key: str, folder: Path) -> None:
    """Refuse a folder with files by these names that stand beside no results.json, and so are none of ours.

    key: what named the folder. Raises UserError.
    """
    refuse_files_of_others(key, [folder / name for name in OTHERS], lambda _: (folder / RESULTS).is_file())


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
        record_files.write_csv(folder / OTHERS[0], records),
        write_text(
            folder / OTHERS[1], "\n".join([*map(tables.markdown, groups), *([absent.markdown()] if absent else [])])
        ),
        write_bytes(folder / OTHERS[2], png(records, failures=failed)),
    ]
