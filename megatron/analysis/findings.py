"""What one analysis found of all models: its file, and its part of the page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.analysis.analysis import Analysis, Looked, NotApplicable
from megatron.utils.atomic_io import write_text_atomically

if TYPE_CHECKING:
    from megatron.analysis.page import Part


class Findings:
    """What an analysis found.

    Args:
        name, analysis: the analysis.
        folder: where its file is written.
    """

    def __init__(self, name: str, analysis: Analysis, folder: Path) -> None:
        self.name, self.analysis = name, analysis
        self.file = folder / f"{name}.{analysis.data}"
        self.found: dict[str, Any] = {}
        """Name of a model → what was measured."""
        self.missing: dict[str, str] = {}
        """Name of a model → why there is nothing to measure."""

    def measure(self, model: Looked) -> None:
        """Measure a model, and write the data of all until now."""
        try:
            self.found[model.name] = self.analysis.measure(model)
        except NotApplicable as reason:
            self.missing[model.name] = str(reason)
        else:
            write_text_atomically(self.file, self._data())

    def _data(self) -> str:
        """`method` first in each row."""
        rows = [{"method": name, **row} for name, each in self.found.items() for row in self.analysis.rows(each)]
        if self.analysis.data == "json":
            return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def part(self, models: Sequence[str]) -> Part:
        """Its part of the page. `models` are the names of all on it."""
        from megatron.analysis.page import Part

        return Part(
            self.name,
            self.analysis.title,
            self.analysis.text,
            self.analysis.show(self.found, models) if self.found else [],
            self.missing,
            self.file.name if self.found else None,
        )
