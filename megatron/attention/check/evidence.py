"""What a check of backends found, as files keep it: in the user's cache folder for every later run like it, and in the
run's folder for whoever reads the run.

A file of the cache is named by what its result is true of (`machine.py` and the problem), and holds that too. One that
is damaged, or of something else, is as good as none.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.jit_build import iter_cache_folders, open_cache_folder
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError

CACHE_FOLDER = "attention_check"
RECORD_FILE = "attention_check.json"
"""In a run's folder."""

CheckKey = Mapping[str, Mapping[str, Any]]
"""What a result is true of, in JSON's types: `card`, `software` and `work`."""


@dataclass(frozen=True)
class Trial:
    """What one backend did."""

    backend: str
    refusal: str | None = None
    """Why it is left; None of one that is right."""
    is_final: bool = True
    """Would it be so again? Not of one that time or memory did not suffice for."""
    excess: Mapping[str, float] | None = None
    """Of the output and each gradient: its error over the size of rounding errors."""
    milliseconds: float | None = None
    """Of a forward and backward pass."""
    memory_mb: float | None = None
    """That a pass adds on the device; None where it cannot be known."""
    first_seconds: float | None = None
    """Of the first pass, in which kernels are compiled."""

    @property
    def is_right(self) -> bool:
        return self.refusal is None

    @property
    def largest_excess(self) -> float:
        """Of all results."""
        return max((self.excess or {}).values(), default=0.0)


@dataclass(frozen=True)
class Evidence:
    """What a check found of each backend."""

    key: CheckKey
    problem: Mapping[str, Any]
    """What was computed and compared (`CheckProblem.describe`)."""
    trials: tuple[Trial, ...]
    seconds: float
    """That the check took."""

    @property
    def is_final(self) -> bool:
        """May later runs rely on it?"""
        return all(trial.is_final for trial in self.trials)

    @property
    def is_compared(self) -> bool:
        """Were values compared? On a device that computes nothing (`megatron/rehearsal/`) there are none."""
        return all(trial.excess for trial in self.trials if trial.is_right)

    def rank_backends(self) -> list[Trial]:
        """The ones that are right, the fastest first."""
        right = [trial for trial in self.trials if trial.is_right and trial.milliseconds is not None]
        return sorted(right, key=lambda trial: trial.milliseconds or 0.0)

    def get_trial(self, backend: str) -> Trial | None:
        """What that backend did, if it was tried."""
        return next((trial for trial in self.trials if trial.backend == backend), None)

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)


def parse_evidence(found: Any) -> Evidence:
    """What `Evidence.to_json` made. Raises ValueError, TypeError or KeyError for anything else."""
    trials = tuple(Trial(**trial) for trial in found["trials"])
    for trial in trials:
        numbers = [trial.milliseconds, trial.memory_mb, trial.first_seconds, *(trial.excess or {}).values()]
        if not isinstance(trial.backend, str) or not all(x is None or isinstance(x, int | float) for x in numbers):
            raise ValueError(f"not a trial: {trial}")
    key = {part: dict(found["key"][part]) for part in ("card", "software", "work")}
    return Evidence(key, dict(found["problem"]), trials, float(found["seconds"]))


def read_cache(key: CheckKey) -> Evidence | None:
    """What a check of exactly this found before; None if there was none, or its file is damaged."""
    try:
        evidence = parse_evidence(json.loads(_find_cache_path(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return evidence if evidence.key == _as_json(key) else None


def write_cache(evidence: Evidence) -> None:
    """Keep it for later runs. Where the folder takes no files they check again."""
    with contextlib.suppress(OSError, FarfieldError):
        write_text_atomically(_find_cache_path(evidence.key), json.dumps(evidence.to_json(), indent=1) + "\n")


def _find_cache_path(key: CheckKey) -> Path:
    name = hashlib.sha256(json.dumps(_as_json(key), sort_keys=True).encode()).hexdigest()[:24]
    folder = next(iter_cache_folders())
    open_cache_folder(folder)
    return folder / CACHE_FOLDER / f"{name}.json"


def _as_json(key: CheckKey) -> Any:
    return json.loads(json.dumps(key))


@dataclass(frozen=True)
class CheckRecord:
    """What a run took, and the evidence of its first rank."""

    backend: str
    line: str
    """What the run said of it."""
    evidence: Evidence

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {"backend": self.backend, "line": self.line, **self.evidence.to_json()}


def write_records(run: Path, records: Sequence[CheckRecord]) -> None:
    """Into a run's folder: one, or a list of those of several kinds of layers.

    Raises UserError or RunError: they cannot be written.
    """
    found = [record.to_json() for record in records]
    write_text_atomically(run / RECORD_FILE, json.dumps(found[0] if len(found) == 1 else found, indent=1) + "\n")


def read_records(run: Path) -> list[CheckRecord]:
    """What the run in a folder took, for each kind of its layers; nothing if it has no record, or a damaged one."""
    try:
        found = json.loads((run / RECORD_FILE).read_text(encoding="utf-8"))
        each = found if isinstance(found, list) else [found]
        return [CheckRecord(str(one["backend"]), str(one["line"]), parse_evidence(one)) for one in each]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
