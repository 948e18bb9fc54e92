"""A folder of results: the same records as results.json, .csv, .md and .png."""

from collections.abc import Sequence
from pathlib import Path

from megatron.files import write_bytes, write_text
from megatron.reports import records as record_files
from megatron.reports import tables
from megatron.reports.layout import layouts
from megatron.reports.records import RESULTS, Record


def write_results(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write results.json, results.csv, results.md and results.png into a folder, each whole or not at all."""
    from megatron.reports.plots import png  # matplotlib takes a while

    return [
        record_files.write(folder / RESULTS, records),
        record_files.write_csv(folder / "results.csv", records),
        write_text(folder / "results.md", "\n".join(tables.markdown(layout) for layout in layouts(records))),
        write_bytes(folder / "results.png", png(records)),
    ]
