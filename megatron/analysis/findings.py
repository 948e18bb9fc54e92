"""What one analysis found of all models: its file, and its part of the page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.analysis.analysis import Analysis, AnalysisContext, NotApplicable
from megatron.utils.atomic_io import write_text_atomically

if TYPE_CHECKING:
    from megatron.analysis.page import PageSection


class AnalysisResults:
    """What an analysis found.

    Args:
        name, analysis: the analysis.
        folder: where its file is written.
    """

    def __init__(self, name: str, analysis: Analysis, folder: Path) -> None:
        self.name, self.analysis = name, analysis
        self.file = folder / f"{name}.{analysis.data}"
        self.results: dict[str, Any] = {}
        """Name of a model → what was measured."""
        self.missing: dict[str, str] = {}
        """Name of a model → why there is nothing to measure."""

    def measure(self, model: AnalysisContext) -> None:
        """Measure a model, and write the data of all until now."""
        try:
            self.results[model.name] = self.analysis.measure(model)
        except NotApplicable as reason:
            self.missing[model.name] = str(reason)
        else:
            write_text_atomically(self.file, self._data())

    def _data(self) -> str:
        """`method` first in each row."""
        rows = [{"method": name, **row} for name, each in self.results.items() for row in self.analysis.list_rows(each)]
        if self.analysis.data == "json":
            return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def to_section(self, models: Sequence[str]) -> PageSection:
        """Its part of the page. `models` are the names of all on it."""
        from megatron.analysis.page import PageSection

        return PageSection(
            self.name,
            self.analysis.title,
            self.analysis.text,
            self.analysis.render_blocks(self.results, models) if self.results else [],
            self.missing,
            self.file.name if self.results else None,
        )
