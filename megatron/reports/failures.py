"""Runs that gave no result, and why: a sweep's failed members, beside its results.

A method whose run diverged has no record, because records hold numbers. What became of it stands beside results.json,
as results.failures.json, so that tables, pages and lists of what is missing can say so:

    [{"method": "rotary", "seed": 1235, "reason": "the loss is not finite", "step": 120}]
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class RunFailure:
    """A run that ended without a result."""

    method: str
    """As records call it: in a sweep the variant."""
    seed: int
    reason: str
    """One line."""
    step: int | None = None
    """At which it failed, if that is known."""
    train_length: int | None = None
    """Of the run; None if that is not known. It then belongs to tables of all training lengths."""
    dataset: str | None = None
    """What it was to be scored on, as records call it; None if that is not known. It then belongs to tables of all."""

    def __post_init__(self) -> None:
        for name, expected_type in (("method", str), ("seed", int), ("reason", str)):
            if not isinstance(getattr(self, name), expected_type):
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        for name in ("step", "train_length"):
            if not isinstance(getattr(self, name), int | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        if not isinstance(self.dataset, str | None):
            raise ValueError(f"dataset is {self.dataset!r}")

    def __str__(self) -> str:
        at_step = "" if self.step is None else f" at step {self.step:,}"
        return f"failed{at_step}: {self.reason}"


def get_failures_path(results_path: Path) -> Path:
    """Where the failures of a results file lie."""
    return results_path.with_suffix(".failures.json")


def write_failures(results_path: Path, failures: Sequence[RunFailure]) -> Path | None:
    """Write failures beside their results file. Without any, no file is left there, and None is returned.

    Raises:
        UserError: what lies there is not a list that this wrote.
    """
    path = get_failures_path(results_path)
    read_failures(results_path)
    if not failures:
        path.unlink(missing_ok=True)
        return None
    rows = [{name: value for name, value in asdict(failure).items() if value is not None} for failure in failures]
    return write_text_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def read_failures(results_path: Path) -> list[RunFailure]:
    """The failures of a results file; none if it has no such file beside it.

    Raises:
        UserError: the file is not one that `write` wrote.
    """
    path = get_failures_path(results_path)
    if not path.is_file():
        return []
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("should be a list of objects")
        return [RunFailure(**row) for row in rows]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: no list of failed runs ({error})") from error
