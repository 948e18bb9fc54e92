"""A part of a report: records that are shown together, and what they say."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.reports.failures import RunFailure
from megatron.reports.records import Record
from megatron.reports.text_table import TextTable


@dataclass(frozen=True)
class ReportSection:
    """Of one experiment, or of all that belongs to none."""

    title: str | None
    """None where it is the whole page, or its part without an experiment."""
    records: Sequence[Record]
    text_tables: Sequence[TextTable] = ()
    """Further tables, shown below those of the records."""
    failures: Sequence[RunFailure] = ()
    """Runs that gave no records."""
