"""Tables of verdicts: training lengths, extrapolation, use of context, and significant differences.

**Training lengths** (DAPE V2, 2410.04798, figure 3: equal tokens, other lengths). Comparison tables separate training
lengths, because a column usually is a multiple of the training length. If all training lengths score the same targets,
their numbers are comparable at equal context lengths.

**Extrapolation**, by the criterion of Exploring Transformer Extrapolation (2307.10156, definition 2.1). With windows of
n tokens and training length m, a model extrapolates if |ppl_n − ppl_m| / ppl_m < δ for every n. The paper gives no δ,
and testing "every n" is impossible, so tables show

    r_n = ppl_n / ppl_m − 1          signed, to distinguish gains from losses
    its largest size over n > m      with δ and the largest n

The ratio is the change from m to n as defined in `comparison_table.py`: for several seeds it is the geometric mean of
their ratios, over the seeds scored at both lengths.

**Use of context** (`context_gain.py`) complements extrapolation: a model with a flat curve may ignore the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.reports import significance
from megatron.reports.comparison_table import Change, ComparisonTable, format_partial_seeds
from megatron.reports.context_gain import build_context_tables
from megatron.reports.table_formats import TextTable
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

DEFAULT_MAX_CHANGE = 0.1
"""Bound of the extrapolation criterion."""


def build_verdict_tables(
    tables: Sequence[ComparisonTable], against: str | None = None, max_change: float = DEFAULT_MAX_CHANGE
) -> list[TextTable]:
    """Build tables of training lengths, extrapolation, use of context, and comparisons with `against`.

    Raises:
        UserError: no table contains the method.
    """
    text_tables = build_train_length_tables(tables)
    text_tables += [
        text_table for table in tables if (text_table := build_extrapolation_table(table, max_change)) is not None
    ]
    text_tables += build_context_tables(tables)
    if against is None:
        return text_tables
    tables_with_methods = [(table, {record.method for record in table.records}) for table in tables]
    comparable_tables = [table for table, methods in tables_with_methods if against in methods and len(methods) > 1]
    if not comparable_tables:
        methods = list(dict.fromkeys(method for table in tables for method in table.methods))
        if against in methods:
            raise UserError(f"--against {against}: the only method in its table; add results of other methods")
        raise UserError(f"--against {against}: unknown method; {format_choices(against, methods)}")
    return text_tables + [significance.build_significance_table(table, against) for table in comparable_tables]


def build_train_length_tables(tables: Sequence[ComparisonTable]) -> list[TextTable]:
    """Build a table for each group of tables that differ only in training length and score the same targets."""
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
    means: dict[float, list[float]] = {}
    for table in ordered:
        for (method, x), cell in table.cells.items():
            if method not in table.trivial_baselines:
                means.setdefault(x, []).append(cell.mean)
    best = {x: metric.find_best(values) for x, values in means.items()}
    max_seeds = max(table.max_seeds for table in ordered)

    def format_cell(table: ComparisonTable, method: str, x: float) -> str:
        cell = table.cells.get((method, x))
        if cell is None:
            return table.get_missing_text(method, x)
        is_trivial_baseline = method in table.trivial_baselines
        partial_num_seeds = cell.num_seeds if cell.num_seeds < max_seeds and not is_trivial_baseline else None
        return str(
            replace(
                cell, is_best=cell.mean == best.get(x) and not is_trivial_baseline, partial_num_seeds=partial_num_seeds
            )
        )

    rows = tuple(
        (method, (f"{table.train_length:,}", *(format_cell(table, method, x) for x in x_values)))
        for table in ordered
        for method in table.methods
    )
    notes = [f"All cells score the same tokens {axis.column_phrase}; {metric.better} is better."]
    if any(value is not None for value in best.values()):
        notes.append("* best in its column.")
    if max_seeds > 1:
        notes.append(f"Cells are mean ± standard deviation of {max_seeds} seeds, or of n seeds where shown.")
    return TextTable(
        title=f"{metric.title_with_unit} of models trained at different lengths, {ordered[0].protocol_description}",
        corner_header="method",
        column_headers=("trained at", *(axis.format_value(x) for x in x_values)),
        rows=rows,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Extrapolation:
    """Extrapolation of one method in a table."""

    method: str
    changes: dict[int, Change]
    """n → change of the perplexity from that at the training length, for larger n."""
    worst_length: int
    """Length n with the largest |r_n|."""

    @property
    def relative_changes(self) -> dict[int, float]:
        """Relative change r_n for each n."""
        return {length: change.mean - 1 for length, change in self.changes.items()}

    def extrapolates(self, max_change: float) -> bool:
        """Return True if |r_n| < δ for every n."""
        return abs(self.relative_changes[self.worst_length]) < max_change


def measure_extrapolation(table: ComparisonTable) -> list[Extrapolation]:
    """Compute the extrapolation of methods scored at the training length and beyond it.

    The table must contain perplexities over lengths. Methods with limited positions are measured up to their maximum
    length.
    """
    if table.metric.name != "perplexity" or table.axis.name != "length":
        return []
    train_length = table.train_length
    results = []
    for method in table.methods:
        changes = {
            round(x): change
            for x in table.x_values
            if x > train_length and (change := table.compute_change(method, train_length, x)) is not None
        }
        if changes:
            worst_length = max(changes, key=lambda length: abs(changes[length].mean - 1))
            results.append(Extrapolation(method, changes, worst_length))
    return results


def build_extrapolation_table(table: ComparisonTable, max_change: float = DEFAULT_MAX_CHANGE) -> TextTable | None:
    """Build the table of the extrapolation criterion, with methods in the order of the comparison table.

    Return None if nothing was scored at the training length and beyond it.
    """
    results = measure_extrapolation(table)
    if not results:
        return None
    rows = []
    for result in results:
        change = result.changes[result.worst_length]
        value = change.format_relative(change.mean)
        if change.interval is not None:
            value += f" [{', '.join(map(change.format_relative, change.interval))}]"
        value += format_partial_seeds(change.partial_num_seeds)
        verdict = f"{'yes' if result.extrapolates(max_change) else 'no'}, up to {max(result.relative_changes):,}"
        rows.append((result.method, (value, f"{result.worst_length:,}", verdict)))
    listed_methods = {result.method for result in results}
    for method, max_length in table.max_lengths.items():
        if method not in listed_methods and max_length <= table.train_length:
            rows.append((method, ("–", "–", f"its maximum length is {max_length:,}")))
            listed_methods.add(method)
    rows += [(method, ("–", "–", "failed")) for method in dict.fromkeys(result.method for result in table.failures)
             if method not in listed_methods]  # fmt: skip
    rows.sort(key=lambda row: table.methods.index(row[0]))
    notes = [
        f"r is the ratio to the perplexity at {table.train_length:,} tokens, minus 1 (2307.10156, definition 2.1; "
        "the paper gives no bound)."
    ]
    if table.max_seeds > 1:
        notes.append(
            f"With several seeds, r is the {table.metric.mean_kind} of the ratios, minus 1, over {table.max_seeds} "
            "seeds unless n is shown."
        )
    return TextTable(
        title=f"Extrapolation beyond {table.train_length:,} tokens, {table.protocol_description}",
        corner_header="method",
        column_headers=("r with the largest |r|", "at", f"extrapolates (|r| < {max_change:g})"),
        rows=tuple(rows),
        notes=tuple(notes),
    )
