"""A part of a report: records that are shown together, and what they say."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.reports.failures import Failure
from megatron.reports.grids import Grid
from megatron.reports.records import Record


@dataclass(frozen=True)
class Section:
    """Of one experiment, or of all that belongs to none."""

    title: str | None
    """None where it is the whole page, or its part without an experiment."""
    records: Sequence[Record]
    grids: Sequence[Grid] = ()
    """Further tables, shown below those of the records."""
    failures: Sequence[Failure] = ()
    """Runs that gave no records."""
