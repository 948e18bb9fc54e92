"""Failed runs of a sweep and their reasons, saved next to its results.

A method whose run diverged has no record, because records contain numbers. Its failure is saved next to results.json,
in results.failures.json, so that tables, pages, and lists of missing results can mention it:

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
    """Run that ended without a result."""

    method: str
    """Method name as in records; in a sweep the name of the variant."""
    seed: int
    reason: str
    """Reason, in one line."""
    step: int | None = None
    """Step at which the run failed, if known."""
    train_length: int | None = None
    """Training length of the run, or None if unknown. If None, the failure appears in tables of all training lengths.
    """
    dataset: str | None = None
    """Dataset to be scored, as in records, or None if unknown. If None, the failure appears in tables of all datasets.
    """

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
    return results_path.with_suffix(".failures.json")


def write_failures(results_path: Path, failures: Sequence[RunFailure]) -> Path | None:
    """Write failures next to their results file. Without failures, remove that file and return None.

    Raises:
        UserError: an existing file at that path is not a list of failures.
    """
    path = get_failures_path(results_path)
    read_failures(results_path)
    if not failures:
        path.unlink(missing_ok=True)
        return None
    rows = [{name: value for name, value in asdict(failure).items() if value is not None} for failure in failures]
    return write_text_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def read_failures(results_path: Path) -> list[RunFailure]:
    """Read the failures of a results file, or return an empty list if there is no such file.

    Raises:
        UserError: the file is not a list of failures.
    """
    path = get_failures_path(results_path)
    if not path.is_file():
        return []
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("expected a list of objects")
        return [RunFailure(**row) for row in rows]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a list of failed runs ({error})") from error
