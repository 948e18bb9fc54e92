"""Reports of records that belong to no experiment, and tables as pages show them."""

from collections.abc import Sequence

from megatron.reports import report
from megatron.reports.html_page import TEMPLATES_FOLDER, HtmlTable, build_environment
from megatron.reports.records import Record
from megatron.reports.report import ReportSection


def page_of(records: Sequence[Record], **more: object) -> str:
    """The page of one section."""
    return report.render_report([ReportSection(None, records)], **more)


def table_html(table: HtmlTable) -> str:
    """A table's markup."""
    return build_environment(TEMPLATES_FOLDER).get_template("macros.html").module.table(table)
