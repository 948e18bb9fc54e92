"""Models of several training lengths side by side (DAPE V2, 2410.04798, figure 3: equal tokens, other lengths).

Tables keep training lengths apart, because a column usually is a multiple of the training length. Where all lengths
score the same targets, their numbers can be compared all the same, at equal lengths of context.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.text_table import TextTable


def build_train_length_tables(tables: Sequence[ComparisonTable]) -> list[TextTable]:
    """A table for all those that differ in the training length alone and score the same targets."""
    tables_by_key: dict[tuple[str, str, int | None, str, str], list[ComparisonTable]] = {}
    for table in tables:
        first_record = table.records[0]
        if first_record.target_digest is not None:
            length = None if first_record.place is None else first_record.length
            key = (table.metric.name, table.axis.name, length, table.protocol, first_record.target_digest)
            tables_by_key.setdefault(key, []).append(table)
    return [_build_train_length_table(comparable) for comparable in tables_by_key.values() if len(comparable) > 1]


def _build_train_length_table(tables: Sequence[ComparisonTable]) -> TextTable:
    ordered = sorted(tables, key=lambda table: table.train_length)
    metric, axis = ordered[0].metric, ordered[0].axis
    x_values = sorted({x for table in ordered for x in table.x_values})
    best = {
        x: metric.select_best(
            cell.mean
            for table in ordered
            for (method, cell_x), cell in table.cells.items()
            if cell_x == x and method not in table.trivial_baselines
        )
        for x in x_values
    }
    max_seeds = max(table.max_seeds for table in ordered)

    def format_cell(table: ComparisonTable, method: str, x: float) -> str:
        cell = table.cells.get((method, x))
        if cell is None:
            return table.get_missing_text(method, x)
        is_trivial_baseline = method in table.trivial_baselines
        partial_num_seeds = cell.num_seeds if cell.num_seeds < max_seeds and not is_trivial_baseline else None
        return str(
            replace(cell, is_best=cell.mean == best[x] and not is_trivial_baseline, partial_num_seeds=partial_num_seeds)
        )

    rows = tuple(
        (method, (f"{table.train_length:,}", *(format_cell(table, method, x) for x in x_values)))
        for table in ordered
        for method in table.methods
    )
    notes = [f"The same tokens are scored {axis.column_phrase}; {metric.better} is better.", "* best of its column."]
    if max_seeds > 1:
        notes.append(f"Cells are mean ± standard deviation of {max_seeds} seeds, those with an n of so many.")
    return TextTable(
        title=f"{metric.title_with_unit} of models that were trained at several lengths, "
        f"{ordered[0].protocol_description}",
        corner_header="method",
        column_headers=("trained at", *(axis.format_value(x) for x in x_values)),
        rows=rows,
        notes=tuple(notes),
    )
