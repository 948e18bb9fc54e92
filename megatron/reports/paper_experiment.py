"""Experiment that reproduces a paper's table or figure: published numbers next to ours, and the known differences.

A sweep of a paper's table saves its experiment next to its results.json, in results.experiment.json. A page of several
experiments can then include everything from each experiment's own report.

Single numbers are not comparable, because corpora, tokenizers, sizes, and protocols differ. The order of methods at a
multiple of the training length is comparable. Agreement is Kendall's τ-b (Kendall 1938, A new measure of rank
correlation): the share of pairs in the same order minus the share of pairs in the opposite order. It is 1 for the same
order, 0 for no agreement, and −1 for the reverse. Our values are means over the seeds common to all compared methods,
so that no method benefits from its seeds. The interval is a bootstrap over our seeds if there are several, else over
blocks of the text. Published numbers are used as printed.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables, format_partial_seeds
from megatron.reports.leaderboard import Ablation, Leaderboard
from megatron.reports.leaderboard_benchmarks import LeaderboardPlan
from megatron.reports.metrics import MAX_PERPLEXITY
from megatron.reports.records import MAX_COUNT, Record, RunFailure
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import (
    BOOTSTRAP_SEED,
    NUM_RESAMPLES,
    compute_percentile_interval,
    draw_bootstrap_means,
)
from megatron.reports.verdict_tables import DEFAULT_MAX_CHANGE, build_verdict_tables
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import UserError

NUM_TAU_RESAMPLES = NUM_RESAMPLES // 10
"""Number of resamples of τ. Each is a ranking, so fewer suffice for two digits."""


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


@dataclass(frozen=True)
class RankAgreement:
    """Agreement between two orders of methods at one multiple of the training length."""

    length_ratio: float
    methods: tuple[str, ...]
    tau: float
    interval: tuple[float, float] | None
    num_seeds: int
    """Number of seeds common to all methods there."""


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
        length_here = table.train_length * length_ratio
        published_values = {
            method: value
            for method, values in published.rows.items()
            if (value := values[column]) is not None and (method, length_here) in table.cells
        }
        if len(published_values) < 2:
            continue
        methods = tuple(published_values)
        records_per_method = _select_shared_seeds(table, methods, length_here)
        if not records_per_method[0]:
            continue
        tau = compute_kendall_tau(
            list(published_values.values()),
            [statistics.fmean(record.value for record in method_records) for method_records in records_per_method],
        )
        samples = _resample_values(records_per_method)
        interval = None
        if samples is not None:
            interval = compute_percentile_interval(
                np.array([compute_kendall_tau(list(published_values.values()), list(sample)) for sample in samples.T])
            )
        agreements.append(RankAgreement(length_ratio, methods, tau, interval, len(records_per_method[0])))
    return agreements


def compute_kendall_tau(values: Sequence[float], other_values: Sequence[float]) -> float:
    """Return Kendall's τ-b of two rankings, or 0 if one of them has only ties."""
    from scipy import stats  # imports slowly (about one second)

    tau = float(stats.kendalltau(values, other_values).statistic)
    return 0.0 if math.isnan(tau) else tau


def _select_shared_seeds(table: ComparisonTable, methods: Sequence[str], x: float) -> list[list[Record]]:
    """Return the records of each method at an x value, for the seeds common to all methods, sorted by seed."""
    records_by_seed: list[dict[int, Record]] = []
    for method in methods:
        method_records = (record for record in table.records if (record.method, record.x_value) == (method, x))
        records_by_seed.append({record.seed: record for record in method_records})
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in records_by_seed)))
    return [[by_seed[seed] for seed in seeds] for by_seed in records_by_seed]


def _resample_values(records_per_method: Sequence[Sequence[Record]]) -> np.ndarray | None:
    """Resample values [methods, resamples] from records [methods, seeds], or return None if that is not possible."""
    num_seeds = len(records_per_method[0])
    if num_seeds > 1:
        values = np.array(
            [[run_record.value for run_record in method_records] for method_records in records_per_method]
        )
        seed_indices = np.random.Generator(np.random.PCG64(BOOTSTRAP_SEED)).integers(
            num_seeds, size=(NUM_TAU_RESAMPLES, num_seeds)
        )
        return values[:, seed_indices].mean(axis=2)
    single_records = [method_records[0] for method_records in records_per_method]
    block_counts = single_records[0].tokens_per_block
    if block_counts is None or any(record.tokens_per_block != block_counts for record in single_records):
        return None
    return draw_bootstrap_means(
        np.array([record.block_sums for record in single_records]),
        np.array(block_counts),
        num_resamples=NUM_TAU_RESAMPLES,
    )


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
            cell = table.cells.get((method, table.train_length * length_ratio))
            published_text = "–" if value is None else metric.format_value(value)
            length_here = table.train_length * length_ratio
            measured_text = str(cell).rstrip("*") if cell is not None else "–"
            if cell is None and method in table.methods and length_here in table.x_values:
                measured_text = table.get_missing_text(method, length_here)
            cells.append(f"{published_text} | {measured_text}")
        rows.append((method, tuple(cells)))
    agreement_cells = []
    for length_ratio in length_ratios:
        rank_agreement_here = agreements.get(length_ratio)
        text = "–" if rank_agreement_here is None else f"{rank_agreement_here.tau:+.2f}"
        if rank_agreement_here is not None and rank_agreement_here.interval is not None:
            text += f" [{rank_agreement_here.interval[0]:+.2f}, {rank_agreement_here.interval[1]:+.2f}]"
        agreement_cells.append(
            text
            + format_partial_seeds(
                None if rank_agreement_here is None else table.get_partial_num_seeds(rank_agreement_here.num_seeds)
            )
        )
    rows.append(("order agreement τ", tuple(agreement_cells)))
    return TextTable(
        title=f"Published | ours: {published.source}; ours: {table.title}",
        corner_header="method",
        column_headers=tuple(
            f"{format_multiple(length_ratio)} ({length:,} | {table.train_length * length_ratio:,.0f})"
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
