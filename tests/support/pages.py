"""Reports of records without an experiment, and tables as shown on pages."""

from collections.abc import Sequence

from megatron.reports import report
from megatron.reports.html_page import TEMPLATES_FOLDER, HtmlTable, build_environment
from megatron.reports.records import Record
from megatron.reports.report import ReportSection


def page_of(records: Sequence[Record], *, num_pending_runs: int = 0, **more: object) -> str:
    """Return a page with one section."""
    section = ReportSection(None, records, num_pending_runs=num_pending_runs)
    return report.render_report([section], **more)


def table_html(table: HtmlTable) -> str:
    return build_environment(TEMPLATES_FOLDER).get_template("macros.html").module.table(table)
