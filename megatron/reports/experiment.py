"""What an experiment adds to its results: its name, papers' tables to stand beside, and what was done otherwise there.

A sweep of a paper's table writes it beside its results.json, as results.experiment.json, so that a page of several
experiments can say of each what its own report says.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.reports import published
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.extrapolation import DEFAULT_DELTA
from megatron.reports.failures import RunFailure
from megatron.reports.published import PublishedTable
from megatron.reports.records import Record
from megatron.reports.text_table import TextTable
from megatron.reports.verdict_tables import build_verdict_tables
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper, made again."""

    title: str | None
    against: str | None = None
    """The method that others are compared with."""
    published: tuple[PublishedTable, ...] = ()
    differences: tuple[str, ...] = ()
    """What the papers did otherwise, or do not say: a sentence each."""

    @property
    def has_paper_comparison(self) -> bool:
        """Is there something of a paper to tell?"""
        return bool(self.published or self.differences)

    def build_tables(
        self, records: Sequence[Record], delta: float = DEFAULT_DELTA, failures: Sequence[RunFailure] = ()
    ) -> list[TextTable]:
        """What the results say, and the papers' tables beside them; `against` counts once its records are there."""
        tables = build_comparison_tables(records, failures)
        methods_per_table = [{record.method for record in table.records} for table in tables]
        has_against = any(self.against in methods and len(methods) > 1 for methods in methods_per_table)
        text_tables = build_verdict_tables(tables, self.against if has_against else None, delta)
        for published_table in self.published:
            text_tables += published.build_published_tables(published_table, tables)
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
        return Experiment(content["title"], content["against"], published_tables, tuple(content["differences"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no experiment of a sweep ({error})") from error
