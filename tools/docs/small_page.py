"""The page docs/results/small.md, written by `make docs`: our results beside the papers' tables, at small size."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.paper_experiment import Experiment, compute_rank_agreement, read_experiment
from megatron.reports.records import Record, read_records
from megatron.reports.report_sentences import describe_environment
from megatron.reports.table_formats import render_comparison_markdown
from tools.docs.card_page import format_range
from tools.docs.record_configuration import find_configuration_change

PAGE = Path("docs/results/small.md")
RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "small"
PAPERS = ("kerple", "dape", "exploring")
"""First words of the records' names, in the order of the page."""
HEAD = """<!-- This page is generated. `make docs` writes it again; edit tools/docs/small_page.py instead. -->
# The papers' tables at small size

This page compares small models, trained on short sequences of bytes, with the tables of the papers.
[reproduce.md](../reproduce.md) describes the setup, the methods, and the differences from the papers. Single
perplexities are not comparable, because text, tokenizer, and size differ; the order of methods is.
[claims.md](../claims.md) tests the claims of the papers with these records, and decides which ones hold.
[small.html](small.html) shows the same results with charts, significance tests, and the papers' tables next to ours.
GitHub shows its source; download it and open it in a browser."""
AGREEMENT = """## Does the papers' order hold at this size?

Kendall's τ is 1 if both orders of methods are equal, 0 if they are unrelated, and −1 if one is the reverse of the
other. Intervals are 95% bootstrap intervals over seeds, or over blocks of text for one seed. They resample few seeds,
and noise lowers τ, so their upper ends are near the estimate. A τ of three methods has four possible values.
† An order contains outdated methods, which the section of its table names: they were trained without keys that now
define them ([claims.md](../claims.md)).

| published table | methods | seeds | τ at the training length | τ at the longest length |
|---|--:|--:|---|---|"""
TABLES = """## Tables

Cells with ± are the mean and standard deviation over seeds. Lower is better, except for ΔP, the gain in perplexity from
context beyond the training length. *Change* compares the longest length with the shortest one, and
[evaluation.md](../evaluation.md#a-change-over-seeds) defines it."""
BUILDING = """## Measuring again

The records are `small/NAME.json`, and `small/NAME.experiment.json` contains the papers' numbers. To renew one, train
its experiment with `./deepy.py sweep small NAME`, copy its `results.json` and `results.experiment.json` here, and run
`make docs`. The other page is written by:

    ./deepy.py report docs/results/small/*[0-9].json --title "The papers' tables at small size" \\
        -o docs/results/small.html"""


@dataclass(frozen=True)
class RecordedExperiment:
    """Experiment of a paper with its records."""

    name: str
    experiment: Experiment
    records: tuple[Record, ...]

    @property
    def order(self) -> tuple[int, bool, int]:
        """Position on the page: by paper, tables before figures, then by number."""
        paper, kind, number = re.fullmatch(r"(\w+)_([tf])(\d+)", self.name).groups()  # type: ignore[union-attr]
        return PAPERS.index(paper), kind == "f", int(number)

    @cached_property
    def outdated_methods(self) -> tuple[str, ...]:
        """Methods that were trained without keys that now define them."""
        first = {record.method: record for record in reversed(self.records)}
        changes = {method: find_configuration_change(self.name, record) for method, record in first.items()}
        return tuple(method for method in reversed(changes) if changes[method].redefines_method)

    @cached_property
    def tables(self) -> list[ComparisonTable]:
        return build_comparison_tables(self.records)


def read_experiments() -> list[RecordedExperiment]:
    """Read all experiments with their records, in the order of the page."""
    found = []
    for path in RECORDS.glob("*[0-9].json"):
        experiment = read_experiment(path)
        assert experiment is not None, f"{path} has no experiment"
        found.append(RecordedExperiment(path.stem, experiment, tuple(read_records(path))))
    return sorted(found, key=lambda recorded: recorded.order)


def render_page() -> str:
    """Render the page."""
    experiments = read_experiments()
    agreements = [AGREEMENT, *(row for recorded in experiments for row in _list_agreement_rows(recorded))]
    sections = [_render_section(recorded) for recorded in experiments]
    return "\n\n".join([HEAD, "\n".join(agreements), TABLES, *sections, BUILDING]) + "\n"


def _list_agreement_rows(recorded: RecordedExperiment) -> Iterator[str]:
    tables = [table for table in recorded.tables if table.axis.name == "length"]
    for published in recorded.experiment.published:
        for table in tables:
            if table.metric.name != published.metric:
                continue
            agreements = [found for found in compute_rank_agreement(published, table) if len(found.methods) > 2]
            if not agreements:
                continue
            first, last = agreements[0], agreements[-1]
            nearest, longest = (f"{found} ({format_multiple(found.length_ratio)})" for found in (first, last))
            mark = " †" if recorded.outdated_methods else ""
            yield f"| {published.source}{mark} | {len(last.methods)} | {last.num_seeds} | {nearest} | {longest} |"


def describe_training(records: Sequence[Record]) -> str:
    """Describe parameters, training tokens, texts, machines, and dates of records in one sentence."""
    parameters = format_range((record.parameters for record in records), 1e6, "M")
    tokens = format_range((record.train_tokens for record in records), 1e6, "M")
    texts = " and ".join(sorted({Path(record.dataset).parent.name for record in records if record.dataset}))
    facts = describe_environment(records)
    days = sorted({record.date[:10] for record in records if record.date})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    setting = f"{parameters} parameters, {tokens} training tokens of {texts}"
    return f"{setting}; {facts['machine']}; {facts['software']}; {when}."


def _render_section(recorded: RecordedExperiment) -> str:
    title = recorded.experiment.title or recorded.name
    sentence = f"`{recorded.name}`: {describe_training(recorded.records)}"
    if recorded.outdated_methods:
        sentence += f" † Outdated, because redefined since: {', '.join(recorded.outdated_methods)}."
    parts = [f"### {title}", textwrap.fill(sentence, 120, break_long_words=False)]
    for table in recorded.tables:
        lines = render_comparison_markdown(table).splitlines()
        rows = [line for line in lines if line.startswith("|")]
        parts += [f"{table.title}:", "\n".join(rows)]
    return "\n\n".join(parts)
