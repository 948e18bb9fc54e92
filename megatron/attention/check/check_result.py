"""Results of a self-check, stored in the user's cache folder for later runs and in the run folder for readers.

A cache file is named by a hash of the conditions of its result (card, software, sources and the problem), and contains
them. A damaged file, or one with other conditions, is ignored.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron.kernels.jit_build import iter_cache_folders, open_cache_folder
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError
from megatron.utils.project import PACKAGES_FOLDER

CACHE_FOLDER = "attention_check"
RECORD_FILE = "attention_check.json"
"""Name of the record in a run folder."""

CheckKey = Mapping[str, Mapping[str, Any]]
"""Conditions of a result, in JSON types: `card`, `software` and `work`."""


@dataclass(frozen=True)
class BackendTrial:
    """Result of one backend."""

    backend: str
    refusal: str | None = None
    """Reason why the backend is rejected; None if it is accepted."""
    is_final: bool = True
    """True if a repetition would give the same result; False if the check ran out of time or memory."""
    excess: Mapping[str, float] | None = None
    """Ratio of the error to the size of rounding errors, for the output and each gradient."""
    milliseconds: float | None = None
    """Duration of a forward and backward pass, in milliseconds."""
    memory_mb: float | None = None
    """Peak device memory of one pass, in MB, or None if unknown."""
    first_seconds: float | None = None
    """Duration of the first pass in seconds, including compilation of kernels."""

    @property
    def is_correct(self) -> bool:
        return self.refusal is None

    @property
    def largest_error_ratio(self) -> float:
        """Largest error ratio over all results."""
        return max((self.excess or {}).values(), default=0.0)


@dataclass(frozen=True)
class CheckResult:
    """Result of the self-check: one trial per backend."""

    key: CheckKey
    problem: Mapping[str, Any]
    """Description of the computed and compared problem (`CheckProblem.describe`)."""
    trials: tuple[BackendTrial, ...]
    seconds: float
    """Duration of the check, in seconds."""

    @property
    def is_final(self) -> bool:
        """True if later runs may reuse this result."""
        return all(trial.is_final for trial in self.trials)

    @property
    def is_compared(self) -> bool:
        """True if values were compared; False on a null device, which computes nothing (`megatron/rehearsal/`)."""
        return all(trial.excess for trial in self.trials if trial.is_correct)

    def rank_backends(self) -> list[BackendTrial]:
        """Return the trials of accepted backends, fastest first."""
        correct = [trial for trial in self.trials if trial.is_correct and trial.milliseconds is not None]
        return sorted(correct, key=lambda trial: trial.milliseconds or 0.0)

    def get_trial(self, backend: str) -> BackendTrial | None:
        """Return the trial of a backend, or None if it was not tried."""
        return next((trial for trial in self.trials if trial.backend == backend), None)

    def to_json(self) -> dict[str, Any]:
        """Return the result in JSON types."""
        return asdict(self)


def parse_check_result(results: Any) -> CheckResult:
    """Parse the result of `CheckResult.to_json`. Raises ValueError, TypeError or KeyError if the input is invalid."""
    trials = tuple(BackendTrial(**trial) for trial in results["trials"])
    for trial in trials:
        numbers = [trial.milliseconds, trial.memory_mb, trial.first_seconds, *(trial.excess or {}).values()]
        if not isinstance(trial.backend, str) or not all(x is None or isinstance(x, int | float) for x in numbers):
            raise ValueError(f"not a trial: {trial}")
    key = {part: dict(results["key"][part]) for part in ("card", "software", "work")}
    return CheckResult(key, dict(results["problem"]), trials, float(results["seconds"]))


def read_cache(key: CheckKey) -> CheckResult | None:
    """Read the result of an earlier check under the same conditions; None if there is none, or its file is damaged."""
    try:
        check_result = parse_check_result(json.loads(_find_cache_path(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return check_result if check_result.key == _to_json(key) else None


def write_cache(check_result: CheckResult) -> None:
    """Write the result to the cache for later runs. If the folder is not writable, later runs check again."""
    with contextlib.suppress(OSError, FarfieldError):
        write_text_atomically(_find_cache_path(check_result.key), json.dumps(check_result.to_json(), indent=1) + "\n")


def _find_cache_path(key: CheckKey) -> Path:
    name = hashlib.sha256(json.dumps(_to_json(key), sort_keys=True).encode()).hexdigest()[:24]
    folder = next(iter_cache_folders())
    open_cache_folder(folder)
    return folder / CACHE_FOLDER / f"{name}.json"


def _to_json(key: CheckKey) -> Any:
    return json.loads(json.dumps(key))


@dataclass(frozen=True)
class CheckRecord:
    """Backend chosen by a run, and the result of its first rank."""

    backend: str
    line: str
    """Message that the run printed about the choice."""
    check_result: CheckResult

    def to_json(self) -> dict[str, Any]:
        """Return the record in JSON types."""
        return {"backend": self.backend, "line": self.line, **self.check_result.to_json()}


def write_records(run: Path, records: Sequence[CheckRecord]) -> None:
    """Write records into a run folder: a single one, or a list if the run has several layer types.

    Raises UserError or RunError if they cannot be written.
    """
    results = [record.to_json() for record in records]
    write_text_atomically(run / RECORD_FILE, json.dumps(results[0] if len(results) == 1 else results, indent=1) + "\n")


def read_records(run: Path) -> list[CheckRecord]:
    """Read the backend choices of a run, one per layer type.

    Returns an empty list if the record is missing or damaged.
    """
    try:
        results = json.loads((run / RECORD_FILE).read_text(encoding="utf-8"))
        each = results if isinstance(results, list) else [results]
        return [CheckRecord(str(one["backend"]), str(one["line"]), parse_check_result(one)) for one in each]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


SOURCES = ("megatron/kernels", "megatron/attention", "megatron/position")
"""Folders with the source files that determine the results of backends."""
SUFFIXES = (".py", ".h")
"""Suffixes of these files: Python, and the headers of CUDA kernels."""
KERNEL_VARIABLE = "FARFIELD_CUDA_MIXER"
"""Environment variable that chooses between kernels (`megatron/kernels/cdape_attention/mixer.py`)."""
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Describe the card of a device, in JSON types."""
    if device.type != "cuda":
        return {"name": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "multi_processors": properties.multi_processor_count,
    }


def describe_software() -> dict[str, Any]:
    """Describe the driver, versions, attention sources and kernel switch, in JSON types."""
    try:
        driver = DRIVER_VERSION.read_text(encoding="utf-8").strip()
    except OSError:
        driver = None
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "sources": hash_attention_sources(),
        "cuda_mixer": os.environ.get(KERNEL_VARIABLE),
    }


@cache
def hash_attention_sources() -> str:
    """Return a hash of all files that determine the results of backends."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(path for path in (PACKAGES_FOLDER / folder).rglob("*") if path.suffix in SUFFIXES):
            digest.update(str(path.relative_to(PACKAGES_FOLDER)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
