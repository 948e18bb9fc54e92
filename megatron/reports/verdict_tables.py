"""What tables say together: training lengths side by side, who extrapolates, who is better beyond chance."""

from collections.abc import Sequence

from megatron.reports import extrapolation, significance, train_length_tables
from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.text_table import TextTable
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices


def build_verdict_tables(
    tables: Sequence[ComparisonTable], against: str | None = None, delta: float = extrapolation.DEFAULT_DELTA
) -> list[TextTable]:
    """What tables say: models of several training lengths side by side, who extrapolates, and who differs from a
    method. Raises UserError if no table has the method."""
    text_tables = train_length_tables.build_train_length_tables(tables)
    text_tables += [
        text_table
        for table in tables
        if (text_table := extrapolation.build_extrapolation_table(table, delta)) is not None
    ]
    if against is None:
        return text_tables
    tables_with_methods = [(table, {record.method for record in table.records}) for table in tables]
    comparable_tables = [table for table, methods in tables_with_methods if against in methods and len(methods) > 1]
    if not comparable_tables:
        methods = list(dict.fromkeys(method for table in tables for method in table.methods))
        hint = "it is alone in its table" if against in methods else format_choices(against, methods)
        raise UserError(f"--against {against}: nothing to compare with it; {hint}")
    return text_tables + [significance.build_significance_table(table, against) for table in comparable_tables]
