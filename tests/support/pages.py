"""Reports of records that belong to no experiment."""

from collections.abc import Sequence

from megatron.reports import report
from megatron.reports.records import Record
from megatron.reports.section import ReportSection


def page_of(records: Sequence[Record], **more: object) -> str:
    """The page of one section."""
    return report.render_report([ReportSection(None, records)], **more)
