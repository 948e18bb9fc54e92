"""An experiment that repeats a paper's table or figure: the paper's numbers beside ours, and what was done otherwise.

A sweep of a paper's table writes its experiment beside its results.json, as results.experiment.json, so that a page of
several experiments can say of each what its own report says.

Single numbers are not comparable: corpora, tokenizers, sizes and protocols differ. What can be compared is the order of
methods at a multiple of the training length. Agreement is Kendall's τ-b (Kendall 1938, A new measure of rank
correlation): the share of pairs that both order alike, minus the share that they order differently; 1 is the same
order, 0 none, −1 the reverse. Ours are means over the seeds that all compared methods share, so that no method is
ahead by the seeds it has. The interval is a bootstrap over what our numbers are made of, with theirs as printed: over
those seeds where there are several, else over blocks of the text.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.reports.bootstrap import BOOTSTRAP_SEED, NUM_RESAMPLES, compute_percentile_interval, draw_bootstrap_means
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables, format_partial_seeds
from megatron.reports.failures import RunFailure
from megatron.reports.leaderboard import Ablation, Leaderboard
from megatron.reports.metrics import MAX_PERPLEXITY
from megatron.reports.records import MAX_COUNT, Record
from megatron.reports.table_formats import TextTable
from megatron.reports.verdict_tables import DEFAULT_DELTA, build_verdict_tables
from megatron.reports.x_axes import format_multiple
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import UserError

NUM_TAU_RESAMPLES = NUM_RESAMPLES // 10
"""Resamples of τ, each of which is a ranking: enough for two digits."""


@dataclass(frozen=True)
class PublishedTable:
    """A table as it was printed."""

    source: str
    train_length: int
    metric: str
    lengths: tuple[int, ...]
    rows: Mapping[str, Sequence[float | None]]
    """Method → values at those lengths."""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper, made again."""

    title: str | None
    against: str | None = None
    """The method that others are compared with."""
    published: tuple[PublishedTable, ...] = ()
    differences: tuple[str, ...] = ()
    """What the papers did otherwise, or do not say: a sentence each."""
    own_seeds: bool = False
    """Have methods seeds of their own, so that one lacks none that another has?"""
    leaderboard: Leaderboard | None = None

    @property
    def is_worth_keeping(self) -> bool:
        """Is there something to tell that the records do not hold?"""
        return bool(self.published or self.differences or self.own_seeds or self.leaderboard)

    def get_leaderboard(self) -> Leaderboard | None:
        """With `against` for its baseline, whoever chose that."""
        if self.leaderboard is None or self.against is None:
            return self.leaderboard
        return replace(self.leaderboard, baseline=self.against)

    def build_tables(
        self, records: Sequence[Record], delta: float = DEFAULT_DELTA, failures: Sequence[RunFailure] = ()
    ) -> list[TextTable]:
        """What the results say, and the papers' tables beside them; `against` counts once its records are there."""
        tables = build_comparison_tables(records, failures)
        methods_per_table = [{record.method for record in table.records} for table in tables]
        has_against = any(self.against in methods and len(methods) > 1 for methods in methods_per_table)
        is_compared = has_against and self.leaderboard is None  # which has comparisons of its own
        text_tables = build_verdict_tables(tables, self.against if is_compared else None, delta)
        for published_table in self.published:
            text_tables += build_published_tables(published_table, tables)
        if self.differences:
            sentences = tuple((sentence, ()) for sentence in self.differences)
            text_tables.append(
                TextTable("What the papers did otherwise, or did not say", "there and here", (), sentences)
            )
        return text_tables


def get_experiment_path(results_path: Path) -> Path:
    """Where the experiment of a results file lies."""
    return results_path.with_suffix(".experiment.json")


def write_experiment(results_path: Path, experiment: Experiment) -> Path:
    """Write an experiment beside its results file."""
    return write_text_atomically(
        get_experiment_path(results_path), json.dumps(asdict(experiment), indent=1, ensure_ascii=False) + "\n"
    )


def read_experiment(results_path: Path) -> Experiment | None:
    """The experiment of a results file; None if it has none.

    Raises:
        UserError: the file is not one that `write` wrote.
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
            content.get("own_seeds", False),  # files of before have neither
            _read_leaderboard(content.get("leaderboard")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no experiment of a sweep ({error})") from error


def _read_leaderboard(content: dict[str, Any] | None) -> Leaderboard | None:
    if content is None:
        return None
    ablations = tuple(Ablation(**ablation) for ablation in content["ablations"])
    names = [content["baseline"], *(name for each in ablations for name in (each.name, each.method, each.base))]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("leaderboard: a method's name should be text")
    if type(content["num_shown"]) is not int or content["num_shown"] < 0:
        raise ValueError(f"leaderboard: num_shown is {content['num_shown']!r}, should be a whole number of at least 0")
    return Leaderboard(content["baseline"], ablations, content["num_shown"])


def _check_numbers(table: PublishedTable) -> None:
    """Raise ValueError if a number of a published table is none or out of range."""
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
    """Of the order of methods at one multiple of the training lengths."""

    length_ratio: float
    methods: tuple[str, ...]
    tau: float
    interval: tuple[float, float] | None
    num_seeds: int
    """That all of them share there."""


def build_published_tables(published: PublishedTable, tables: Sequence[ComparisonTable]) -> list[TextTable]:
    """Their table, with ours beside it at the same multiples of the training length, for each of ours that fits."""
    matching_tables = [
        table
        for table in tables
        if table.metric.name == published.metric
        and table.axis.name == "length"
        and not published.rows.keys().isdisjoint(table.methods)
    ]
    return [_build_published_table(published, table) for table in matching_tables]


def compute_rank_agreement(published: PublishedTable, table: ComparisonTable) -> list[RankAgreement]:
    """How far both orders agree, at every multiple that both have, over methods that both have there.

    A multiple at which our methods share no seed is left out.
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
        tau = kendall_tau(
            list(published_values.values()),
            [statistics.fmean(record.value for record in method_records) for method_records in records_per_method],
        )
        samples = _resample_values(records_per_method)
        interval = None
        if samples is not None:
            interval = compute_percentile_interval(
                np.array([kendall_tau(list(published_values.values()), list(sample)) for sample in samples.T])
            )
        agreements.append(RankAgreement(length_ratio, methods, tau, interval, len(records_per_method[0])))
    return agreements


def kendall_tau(values: Sequence[float], other_values: Sequence[float]) -> float:
    """Kendall's τ-b of two rankings of the same things; 0 where one of them has all tied."""
    from scipy import stats  # takes a second to import

    tau = float(stats.kendalltau(values, other_values).statistic)
    return 0.0 if math.isnan(tau) else tau


def _select_shared_seeds(table: ComparisonTable, methods: Sequence[str], x: float) -> list[list[Record]]:
    """Of each method its records at a place, of the seeds that all of them have there, in the order of the seeds."""
    records_by_seed: list[dict[int, Record]] = []
    for method in methods:
        method_records = (record for record in table.records if (record.method, record.x_value) == (method, x))
        records_by_seed.append({record.seed: record for record in method_records})
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in records_by_seed)))
    return [[by_seed[seed] for seed in seeds] for by_seed in records_by_seed]


def _resample_values(records_per_method: Sequence[Sequence[Record]]) -> np.ndarray | None:
    """Values [methods, resamples] as they might have come out, of records [methods, seeds]; None if not known."""
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
        title=f"Theirs | ours: {published.source}; ours: {table.title}",
        corner_header="method",
        column_headers=tuple(
            f"{format_multiple(length_ratio)} ({length:,} | {table.train_length * length_ratio:,.0f})"
            for length_ratio, length in zip(length_ratios, published.lengths, strict=True)
        ),
        rows=tuple(rows),
        notes=(
            "Single numbers are not comparable; orders of methods are.",
            "τ is Kendall's, 1 for the same order and −1 for the reverse; its 95% interval is a bootstrap over our "
            "seeds, or over blocks of our text where there is one seed.",
            *(["It takes the seeds that all our methods share at a length."] if table.max_seeds > 1 else []),
        ),
    )
