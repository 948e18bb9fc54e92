"""Results of a method in the leaderboard's record (docs/results/zoo.json), for the method's page."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Leaderboard, LeaderboardReport
from megatron.reports.records import read_records
from megatron.reports.table_formats import TextTable

RECORD = Path("docs/results/zoo.json")
BASELINE = "rotary"
METRIC, FULL_SEEDS = "perplexity", 3
"""Text metric, and number of seeds of methods named in a question of the leaderboard."""
ORDINARY_WORDS = {"none", "learned"}
"""Methods whose names occur as ordinary words in texts about other methods."""
TITLES = {"Leaderboard": "Ranks and scores"}
"""Titles that replace those of the report's tables on pages that already have a heading of the same name."""


class LeaderboardResults:
    """Tables of the leaderboard, of which each page shows some rows.

    Args:
        root: repository folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records = read_records(root / RECORD)
        tables = build_comparison_tables(self.records)
        self.tables = LeaderboardReport(Leaderboard(BASELINE), tables).build_tables()
        text = [record for record in self.records if record.metric == METRIC]
        self.longest = max(record.length for record in text)
        self.seeds: dict[str, set[int]] = {}
        self.values: dict[str, list[float]] = {}
        """Perplexities at the longest length by method, one per seed."""
        for record in text:
            self.seeds.setdefault(record.method, set()).add(record.seed)
            if record.length == self.longest:
                self.values.setdefault(record.method, []).append(record.value)

    def describe(self, name: str, entry: str) -> str:
        """Return the results section of a method's page.

        Args:
            name: name of the method.
            entry: entry of docs/positions.md, if its advice is about methods of the same kind; otherwise empty.
        """
        variants = {
            record.method
            for record in self.records
            if name in re.findall(r"\w+", f"{record.position or ''} {record.method}") and not record.is_trivial_baseline
        }
        if not variants:
            return f"The [leaderboard](../results/{RECORD.stem}.md) does not include it."
        parts = [self._describe_budget(), self._compare_with_advice(name, entry)]
        return "\n\n".join(filter(None, [*parts, *(self._render_rows(table, variants) for table in self.tables)]))

    def _describe_budget(self) -> str:
        """Describe the setup of the results."""
        baseline = next(record for record in self.records if record.metric == METRIC and record.method == BASELINE)
        task_seeds = {record.seed for record in self.records if record.metric != METRIC and record.run is not None}
        tasks = ""
        if task_seeds:
            seeds = "one seed each" if len(task_seeds) == 1 else f"{len(task_seeds)} seeds each"
            tasks = f"; needles and tasks have {seeds}"
        return (
            f"For the text, a model of {(baseline.parameters or 0) / 1e6:.2f}M parameters is trained for "
            f"{baseline.step} steps and evaluated on {baseline.dataset}; perplexities on other texts or after other "
            f"numbers of steps differ. A perplexity is the mean over {FULL_SEEDS} seeds, or over n seeds if marked "
            f"(n …){tasks}. {BASELINE} is shown for comparison. For the setup and all other "
            "methods, see "
            f"[the leaderboard](../results/{RECORD.stem}.md)."
        )

    def _compare_with_advice(self, name: str, entry: str) -> str:
        """Compare the methods named in an entry's advice by the record."""
        advice = re.split(r"^- \*\*", entry.partition("- **When:**")[2], maxsplit=1, flags=re.MULTILINE)[0]
        words = [word for word in dict.fromkeys(re.findall(r"\w+", advice)) if word not in ORDINARY_WORDS]
        methods = [name, *(word for word in words if word in self.values and word != name)]
        if name not in self.values or len(methods) == 1:
            return ""
        found = []
        for method in methods:
            num_seeds = len(self.seeds[method])
            mean = statistics.fmean(self.values[method])
            found.append(f"{mean:.2f} for `{method}` ({num_seeds} seed{'s' * (num_seeds > 1)})")
        doubt = ": a result of one seed may be chance" if any(len(self.seeds[each]) == 1 for each in methods) else ""
        return (
            f"The advice above concerns larger models. Here the mean perplexity at {self.longest:,} tokens is "
            f"{', '.join(found[:-1])} and {found[-1]}{doubt}."
        )

    def _render_rows(self, table: TextTable, variants: set[str]) -> str:
        """Render the rows of some methods and of the baseline, with the table's title above."""
        rows = [row for row in table.rows if row[0] in variants]
        rows += [row for row in table.rows if row[0] == BASELINE and BASELINE not in variants]
        marked = []
        for method, cells in rows:
            pairs = zip(table.column_headers, cells, strict=True)
            marked.append((method, tuple(cell + self._mark_seeds(method, header, cell) for header, cell in pairs)))
        own = replace(table, rows=tuple(marked), notes=(), lead=())
        shown = _transpose(own) if len(rows) < len(table.column_headers) else own
        grid = shown.to_markdown().partition("\n\n")[0]
        return f"### {TITLES.get(table.title, table.title)}\n\n{grid}"

    def _mark_seeds(self, method: str, header: str, cell: str) -> str:
        """Mark a perplexity with its number of seeds, if there are fewer than for other methods."""
        num_seeds = len(self.seeds.get(method, ()))
        is_marked = header.startswith(f"{METRIC} at") and 0 < num_seeds < FULL_SEEDS and cell != "–"
        return f" (n {num_seeds})" if is_marked else ""


def _transpose(table: TextTable) -> TextTable:
    """Transpose a table to one column per method, which is narrower for few methods."""
    names = tuple(name for name, _ in table.rows)
    cells = zip(table.column_headers, *(cells for _, cells in table.rows), strict=True)
    return replace(table, corner_header="", column_headers=names, rows=tuple((row[0], row[1:]) for row in cells))
