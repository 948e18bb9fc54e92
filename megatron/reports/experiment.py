"""What an experiment adds to its results: its name, papers' tables to stand beside, and what was done otherwise there.

A sweep of a paper's table writes it beside its results.json, as results.experiment.json, so that a page of several
experiments can say of each what its own report says.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.files import parse_json, write_text
from megatron.reports import published
from megatron.reports.extrapolation import DELTA
from megatron.reports.failures import Failure
from megatron.reports.grids import Grid
from megatron.reports.judgement import judged
from megatron.reports.layout import layouts
from megatron.reports.published import Published
from megatron.reports.records import Record


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper, made again."""

    title: str | None
    against: str | None = None
    """The method that others are compared with."""
    published: tuple[Published, ...] = ()
    differences: tuple[str, ...] = ()
    """What the papers did otherwise, or do not say: a sentence each."""

    @property
    def of_a_paper(self) -> bool:
        """Is there something of a paper to tell?"""
        return bool(self.published or self.differences)

    def grids(self, records: Sequence[Record], delta: float = DELTA, failures: Sequence[Failure] = ()) -> list[Grid]:
        """What the results say, and the papers' tables beside them; `against` counts once its records are there."""
        groups = layouts(records, failures)
        measured = [{record.method for record in layout.records} for layout in groups]
        there = any(self.against in methods and len(methods) > 1 for methods in measured)
        grids = judged(groups, self.against if there else None, delta)
        for each in self.published:
            grids += published.grids(each, groups)
        if self.differences:
            sentences = tuple((sentence, ()) for sentence in self.differences)
            grids.append(Grid("What the papers did otherwise, or did not say", "there and here", (), sentences))
        return grids


def beside(results: Path) -> Path:
    """Where the experiment of a results file lies."""
    return results.with_suffix(".experiment.json")


def write(results: Path, experiment: Experiment) -> Path:
    """Write an experiment beside its results file."""
    return write_text(beside(results), json.dumps(asdict(experiment), indent=1, ensure_ascii=False) + "\n")


def read(results: Path) -> Experiment | None:
    """The experiment of a results file; None if it has none.

    Raises:
        UserError: the file is not one that `write` wrote.
    """
    path = beside(results)
    if not path.is_file():
        return None
    try:
        told: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        tables = tuple(Published(**each | {"lengths": tuple(each["lengths"])}) for each in told["published"])
        return Experiment(told["title"], told["against"], tables, tuple(told["differences"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no experiment of a sweep ({error})") from error
