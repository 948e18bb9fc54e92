"""Records of a run: training intervals, validations, tasks, and the end of a run whose loss stayed bad.

They are stored in the run's metrics.jsonl, one JSON object per line. Everything that reads them, or the run's
heartbeat.json, reads them here, without torch.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.options.training import MAX_STEPS
from megatron.utils.atomic_io import parse_json

METRICS_FILE = "metrics.jsonl"
DIVERGED_KIND = "diverged"
"""Kind of the record that ends a run whose loss stayed bad; it has the step, and the reason in one line."""
UNREADABLE_FILE = "metrics.unreadable.txt"
"""File in the run's folder for damaged lines of its records, unchanged."""
HEARTBEAT_FILE = "heartbeat.json"
"""File in the run's folder with the position of the first rank, updated every few seconds while the run is alive."""


def compute_perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that exceeds the range of a float."""
    return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan


@dataclass(frozen=True)
class TrainRecord:
    """Interval of steps up to and including `step`. Unknown values are None."""

    step: int
    loss: float | None  # mean over the interval's steps in nats per token; None if all were skipped
    perplexity: float | None
    learning_rate: float  # at the last step
    grad_norm: float | None  # at the last step that was not skipped, before clipping
    tokens_per_second: float  # of the whole run, all processes together
    ms_per_step: float
    tflops: float  # per device, TFLOP/s
    mfu: float | None  # model FLOPs utilization, a fraction of the device's peak
    loss_scale: float
    skipped_steps: int  # since step 0
    memory_gib: float  # maximum over all processes
    tokens: int  # tokens consumed since step 0
    seconds_left: float
    data_wait: float = 0.0  # fraction of the time that the longest-waiting rank waited for its batches
    data_wait_rank: int | None = None  # that rank; None with one process
    checkpoint_wait: float = 0.0  # fraction of the time that training waited for checkpoints, including this time
    slowest_rank: int | None = None  # rank with the slowest forward pass relative to the median of its pipeline stage
    slowdown: float | None = None  # relative slowdown against that median
    slowest_rank_wait: float = 0.0  # fraction of a step that the other ranks may wait for that rank
    param_norm: dict[str, float] | None = None  # after the last step, by group and module (log_param_norm)
    update_norm: dict[str, float] | None = None  # norms of the last update
    cpu_ms_per_step: float | None = None  # CPU time of the first rank; on GPUs the host's work per step
    z_loss: float | None = None  # mean over the interval's steps, including the coefficient; None without z-loss

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "train", **asdict(self)}


def list_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers of a record by name, and those of a nested mapping by `name/key`."""
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            scalars.update((f"{name}/{key}", number) for key, number in value.items())
        elif name not in ("step", "kind") and value is not None:
            scalars[name] = value
    return scalars


@dataclass(frozen=True)
class ValidationRecord:
    """Validation, or the test at the end."""

    step: int
    split: str
    loss: float  # nats per token
    perplexity: float
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.split, **{k: v for k, v in asdict(self).items() if k != "split"}}


HARNESS_KIND = "harness/"
"""Prefix of the kinds of lm-evaluation-harness records; the name of the task follows."""


@dataclass(frozen=True)
class TaskRecord:
    """Evaluation on a task of lm-evaluation-harness, or on a group that has its own score."""

    step: int
    task: str
    values: dict[str, float]
    """Values by metric, as in records of `evaluate --tasks`, with a filter or text length as a suffix: `f1/strict`."""
    stderrs: dict[str, float]
    """Standard errors of those values for which they are known."""
    tokens: int  # scored or generated
    requests: int
    seconds: float  # for all tasks together

    def to_dict(self) -> dict[str, Any]:
        """Return one number per key, so that values and errors are scalars of the record."""
        counts = {"tokens": self.tokens, "requests": self.requests, "seconds": self.seconds}
        errors = {f"{name}_stderr": error for name, error in self.stderrs.items()}
        return {"kind": f"{HARNESS_KIND}{self.task}", "step": self.step, **self.values, **errors, **counts}


@dataclass(frozen=True)
class DivergenceRecord:
    """End of a run before its last step because of its loss or its gradients."""

    step: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"kind": DIVERGED_KIND, **asdict(self)}


def read_metrics_log(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a file of records, each with its line end and its record. Damaged lines are left out."""
    for line, record in _parse_lines(path):
        if record is not None:
            yield line + "\n", record


def find_unreadable_lines(path: Path) -> dict[int, str]:
    """Return the damaged lines of a file of records by their number, counted from 1.

    An incomplete last line is not damaged: a crash leaves it, and the resumed run writes that record again.
    """
    lines = list(_parse_lines(path))
    if lines and lines[-1][1] is None and not path.read_bytes().endswith(b"\n"):
        lines.pop()
    return {number: line for number, (line, record) in enumerate(lines, start=1) if record is None}


def describe_damage(path: Path, damaged: Iterable[int]) -> str:
    """Describe the damaged lines of a file of records."""
    numbers = [str(number) for number in damaged]
    shown = ", ".join(numbers[:5]) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"{path}: line{'s' * (len(numbers) > 1)} {shown} cannot be read"


def _parse_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    if not path.is_file():
        return
    # Not splitlines: damaged bytes may look like a Unicode line end, which does not end a JSON line.
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        yield line, parse_record(line)


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None for a damaged line.

    The step must be an integer, not merely equal to one: a run is truncated after a step.
    """
    try:
        value = parse_json(line)
    except ValueError:
        return None
    is_record = isinstance(value, dict) and type(value.get("step")) is int and isinstance(value.get("kind"), str)
    return value if is_record and 0 <= value["step"] <= MAX_STEPS else None


@dataclass
class MetricsFollower:
    """Reader of a growing file of records. Each read continues where the last one ended.

    An incomplete line at the end is left for the next read. A file that became shorter or was replaced is read from its
    beginning.
    """

    path: Path
    _offset: int = 0
    _inode: int = 0

    def read_lines(self) -> tuple[list[bytes], bool]:
        """Return the new lines, and True if the file was replaced, so that lines of earlier reads no longer count."""
        if not self.path.is_file():  # opening a pipe would wait for a writer
            return [], False
        is_replaced = False
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._offset or status.st_ino != self._inode:
                    is_replaced, self._offset, self._inode = True, 0, status.st_ino
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return [], is_replaced
        self._offset += len(whole) + len(end)
        return whole.split(b"\n") if end else [], is_replaced


def read_last_step(path: Path, since: float) -> int | None:
    """Return the newest step in a file of records if the file was written after `since`, else None."""
    try:
        if path.stat().st_mtime < since:
            return None
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 14)))
            lines = file.read().split(b"\n")[:-1]  # the last line may still be incomplete
    except OSError:
        return None
    return next((record["step"] for line in reversed(lines) if (record := parse_record(line)) is not None), None)


def read_heartbeat(run: Path) -> dict[str, Any]:
    """Return the run's last heartbeat; empty if missing, or if the run has ended. Raises OSError or ValueError."""
    path = run / HEARTBEAT_FILE
    if not path.exists():
        return {}
    if not path.is_file():  # reading a pipe would block
        raise ValueError("not a regular file")
    text = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(text, dict):
        raise ValueError("not a JSON object")
    return text


def find_divergence(run: str | Path) -> tuple[int, str] | None:
    """Return step and reason if a run ended because its loss stayed bad and was not restarted since, or None."""
    last = None
    for _, record in read_metrics_log(Path(run) / METRICS_FILE):
        last = record
    if last is None or last["kind"] != DIVERGED_KIND:
        return None
    return int(last["step"]), str(last.get("reason"))


def has_logged_record(run: str | Path, kind: str, step: int) -> bool:
    """Return True if a run's folder has a record of this kind (train, valid, test) and step."""
    return any(
        record.get("kind") == kind and record["step"] == step
        for _, record in read_metrics_log(Path(run) / METRICS_FILE)
    )
