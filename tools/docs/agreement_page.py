"""The page docs/results/agreement.md, written by `make docs`: the leaderboard's order of methods at other budgets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.leaderboard import find_text_table
from megatron.reports.rank_agreement import build_agreement_table
from megatron.reports.records import read_records
from tools.docs.card_page import format_range, list_seeds
from tools.docs.record_configuration import LEADERBOARD

PAGE = Path("docs/results/agreement.md")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@dataclass(frozen=True)
class OtherBudget:
    """Record to compare with the leaderboard."""

    name: str
    difference: str
    """Difference from the leaderboard, as a heading."""
    redefined: tuple[str, ...] = ()
    """Methods that have been redefined since the record; they are left out."""
    num_best: int = 12
    """Number of best methods whose agreement has its own row."""


OTHERS = (
    OtherBudget("zoo_text", "Four times the training, on source code instead of Shakespeare", ("cope",)),
    OtherBudget("zoo_3m", "Four times the parameters and nineteen times the training, on the same text", num_best=6),
)
HEAD = """<!-- This page is generated. `make docs` writes it again; edit tools/docs/agreement_page.py instead. -->
# Does the order of methods hold at other budgets?

The [leaderboard](zoo.md) trains small models for few steps. Its order of methods means more if other budgets confirm
it. Each section compares the perplexities of methods that both experiments trained, at equal multiples of the training
length. Methods that fail beyond the training length dominate the agreement over all methods. The last row therefore
repeats it for the best methods of the leaderboard, which differ little."""


def read_text_table(name: str, redefined: Sequence[str] = ()) -> ComparisonTable:
    """Read the table of perplexities over lengths of a record, without the methods that have been redefined."""
    path = RESULTS / f"{name}.json"
    kept = [record for record in read_records(path) if record.method not in redefined]
    table = find_text_table(build_comparison_tables(kept))
    assert table is not None, f"{path} has no perplexities over lengths"
    return table


def describe_budget(table: ComparisonTable) -> str:
    """Describe the parameters, training tokens, and seeds of a table."""
    parameters = format_range((record.parameters for record in table.records), 1e6, "M")
    tokens = format_range((record.train_tokens for record in table.records), 1e6, "M")
    seeds = format_range(map(len, list_seeds(table.records)))
    return f"{parameters} parameters, {tokens} training tokens, {seeds} seed{'s' if table.max_seeds > 1 else ''}"


def render_page() -> str:
    """Render the page."""
    return "\n\n".join(_render_parts()) + "\n"


def _render_parts() -> Iterator[str]:
    yield HEAD
    board = read_text_table(LEADERBOARD)
    for budget in OTHERS:
        other = read_text_table(budget.name, budget.redefined)
        yield f"## {budget.difference}"
        lines = [f"- Leaderboard: {describe_budget(board)}.", f"- `{budget.name}.json`: {describe_budget(other)}."]
        lines += [f"- Left out, because redefined since: {', '.join(budget.redefined)}."] if budget.redefined else []
        yield "\n".join(lines)
        title = f"Perplexity: leaderboard | {budget.name}"
        yield build_agreement_table(board, other, title, [budget.num_best]).to_markdown().rstrip()
