"""Experiment that reproduces a paper's table or figure: published numbers next to ours, and the known differences.

A sweep of a paper's table saves its experiment next to its results.json, in results.experiment.json. A page of several
experiments can then include everything from each experiment's own report.

Single numbers are not comparable, but the order of methods is; `rank_agreement.py` defines the agreement of two orders.
Published numbers are used as printed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables, format_partial_seeds
from megatron.reports.leaderboard import Ablation, Leaderboard
from megatron.reports.leaderboard_benchmarks import LeaderboardPlan
from megatron.reports.metrics import MAX_PERPLEXITY
from megatron.reports.rank_agreement import (
    RankAgreement,
    compute_kendall_tau,
    measure_order,
)
from megatron.reports.records import MAX_COUNT, Record
from megatron.reports.run_records import RunFailure
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import compute_percentile_interval
from megatron.reports.verdict_tables import DEFAULT_MAX_CHANGE, build_verdict_tables
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class PublishedTable:
    """Table as printed in a paper."""

    source: str
    train_length: int
    metric: str
    lengths: tuple[int, ...]
    rows: Mapping[str, Sequence[float | None]]
    """Method → values at those lengths."""


@dataclass(frozen=True)
class Experiment:
    """Reproduction of a paper's table or figure."""

    title: str | None
    against: str | None = None
    """Method that others are compared with."""
    published: tuple[PublishedTable, ...] = ()
    differences: tuple[str, ...] = ()
    """Known or possible differences from the paper, one sentence each."""
    own_seeds: bool = False
    """True if each method has its own seeds, so that no method lacks a seed of another."""
    leaderboard: Leaderboard | None = None
    num_runs: int | None = None
    """Number of runs of the sweep, or None if unknown."""
    run_digests: Mapping[str, str] | None = None
    """Digest of each run of the sweep by the path of its saved records (`run_records.py`), or None if unknown."""

    @property
    def has_information(self) -> bool:
        """True if the experiment contains information beyond the records."""
        return bool(self.published or self.differences or self.own_seeds or self.leaderboard)

    def get_leaderboard(self) -> Leaderboard | None:
        """Return the leaderboard, with `against` as its baseline if given."""
        if self.leaderboard is None or self.against is None:
            return self.leaderboard
        return replace(self.leaderboard, baseline=self.against)

    def build_tables(
        self, records: Sequence[Record], max_change: float = DEFAULT_MAX_CHANGE, failures: Sequence[RunFailure] = ()
    ) -> list[TextTable]:
        """Build tables of results and of published values. `against` applies once its records exist."""
        tables = build_comparison_tables(records, failures)
        methods_per_table = [{record.method for record in table.records} for table in tables]
        has_against = any(self.against in methods and len(methods) > 1 for methods in methods_per_table)
        is_compared = has_against and self.leaderboard is None  # leaderboards have their own comparisons
        text_tables = build_verdict_tables(tables, self.against if is_compared else None, max_change)
        for published_table in self.published:
            text_tables += build_published_tables(published_table, tables)
        if self.differences:
            sentences = tuple((sentence, ()) for sentence in self.differences)
            text_tables.append(TextTable("Known and possible differences from the papers", "difference", (), sentences))
        return text_tables


def get_experiment_path(results_path: Path) -> Path:
    return results_path.with_suffix(".experiment.json")


def write_experiment(results_path: Path, experiment: Experiment) -> Path:
    return write_text_atomically(
        get_experiment_path(results_path), json.dumps(asdict(experiment), indent=1, ensure_ascii=False) + "\n"
    )


def read_experiment(results_path: Path) -> Experiment | None:
    """Read the experiment of a results file, or return None if it has none.

    Raises:
        UserError: the file is not an experiment.
    """
    path = get_experiment_path(results_path)
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        published_tables = tuple(
            PublishedTable(**table_fields | {"lengths": tuple(table_fields["lengths"])})
            for table_fields in content["published"]
        )
        for table in published_tables:
            _check_numbers(table)
        return Experiment(
            content["title"],
            content["against"],
            published_tables,
            tuple(content["differences"]),
            content.get("own_seeds", False),  # missing in files of earlier versions
            _read_leaderboard(content.get("leaderboard")),
            _read_num_runs(content.get("num_runs")),
            _read_run_digests(content.get("run_digests")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not an experiment of a sweep ({error})") from error


def _read_num_runs(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"num_runs is {value!r}")
    return value


def _read_run_digests(value: Any) -> dict[str, str] | None:
    if value is not None and not (isinstance(value, dict) and all(isinstance(each, str) for each in value.values())):
        raise ValueError("run_digests is not a mapping of texts")
    return value


def _read_leaderboard(content: dict[str, Any] | None) -> Leaderboard | None:
    if content is None:
        return None
    ablations = tuple(Ablation(**ablation) for ablation in content["ablations"])
    names = [content["baseline"], *(name for each in ablations for name in (each.name, each.method, each.base))]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("leaderboard: method names must be strings")
    if type(content["num_shown"]) is not int or content["num_shown"] < 0:
        raise ValueError(f"leaderboard: num_shown is {content['num_shown']!r}; it must be an integer of at least 0")
    plan = None
    if (planned := content.get("plan")) is not None:  # missing in files of earlier versions
        plan = LeaderboardPlan(*(tuple(planned[name]) for name in ("methods", "seeds", "benchmarks")))
    return Leaderboard(content["baseline"], ablations, content["num_shown"], plan)


def _check_numbers(table: PublishedTable) -> None:
    """Check that all numbers of a published table are valid; raise ValueError otherwise."""
    for length in (table.train_length, *table.lengths):
        if type(length) is not int or not 1 <= length <= MAX_COUNT:
            raise ValueError(f"{length!r} is not a length of at most {MAX_COUNT:,} tokens")
    for method, values in table.rows.items():
        if len(values) != len(table.lengths):
            raise ValueError(f"{method}: {len(values)} values at {len(table.lengths)} lengths")
        for value in values:
            if value is not None and (type(value) not in (int, float) or not abs(value) <= MAX_PERPLEXITY):
                raise ValueError(f"{method}: {value!r} is not a number of at most {MAX_PERPLEXITY:g}")


def build_published_tables(published: PublishedTable, tables: Sequence[ComparisonTable]) -> list[TextTable]:
    """Build a table with published and our values at equal multiples of the training length, per matching table."""
    matching_tables = [
        table
        for table in tables
        if table.metric.name == published.metric
        and table.axis.name == "length"
        and not published.rows.keys().isdisjoint(table.methods)
    ]
    return [_build_published_table(published, table) for table in matching_tables]


def compute_rank_agreement(published: PublishedTable, table: ComparisonTable) -> list[RankAgreement]:
    """Compute the agreement of both orders at every common multiple, over the methods that both have there.

    Multiples at which our methods share no seed are skipped.
    """
    agreements = []
    for column, length in enumerate(published.lengths):
        length_ratio = length / published.train_length
        length_here = table.get_length_at_multiple(length_ratio)
        published_values = {
            method: value
            for method, values in published.rows.items()
            if (value := values[column]) is not None and (method, length_here) in table.cells
        }
        if len(published_values) < 2:
            continue
        methods, values_there = tuple(published_values), list(published_values.values())
        order = measure_order(table, methods, length_here)
        if order is None:
            continue
        interval = None
        if order.samples is not None:
            interval = compute_percentile_interval(compute_kendall_tau(values_there, order.samples))
        tau = float(compute_kendall_tau(values_there, order.values))
        agreements.append(RankAgreement(length_ratio, methods, tau, interval, order.num_seeds))
    return agreements


def _build_published_table(published: PublishedTable, table: ComparisonTable) -> TextTable:
    metric = table.metric
    agreements = {
        rank_agreement.length_ratio: rank_agreement for rank_agreement in compute_rank_agreement(published, table)
    }
    length_ratios = [length / published.train_length for length in published.lengths]
    rows = []
    for method, values in published.rows.items():
        cells = []
        for length_ratio, value in zip(length_ratios, values, strict=True):
            length_here = table.get_length_at_multiple(length_ratio)
            cell = table.cells.get((method, length_here))
            published_text = "–" if value is None else metric.format_value(value)
            measured_text = str(cell).rstrip("*") if cell is not None else "–"
            if cell is None and method in table.methods and length_here in table.x_values:
                measured_text = table.get_missing_text(method, length_here)
            cells.append(f"{published_text} | {measured_text}")
        rows.append((method, tuple(cells)))
    agreement_cells = []
    for length_ratio in length_ratios:
        rank_agreement_here = agreements.get(length_ratio)
        agreement_cells.append(
            ("–" if rank_agreement_here is None else str(rank_agreement_here))
            + format_partial_seeds(
                None if rank_agreement_here is None else table.get_partial_num_seeds(rank_agreement_here.num_seeds)
            )
        )
    rows.append(("order agreement τ", tuple(agreement_cells)))
    return TextTable(
        title=f"Published | ours: {published.source}; ours: {table.title}",
        corner_header="method",
        column_headers=tuple(
            f"{format_multiple(length_ratio)} ({length:,} | {table.get_length_at_multiple(length_ratio):,.0f})"
            for length_ratio, length in zip(length_ratios, published.lengths, strict=True)
        ),
        rows=tuple(rows),
        notes=(
            "Single numbers are not comparable; the order of methods is.",
            "Kendall's τ is 1 for the same order and −1 for the reverse; its 95% interval is a bootstrap over our "
            "seeds, or over blocks of our text if there is one seed.",
            *(["It uses the seeds that all our methods share at a length."] if table.max_seeds > 1 else []),
        ),
    )
