"""What a run reports: records of training intervals, of validations, and of the end of a run whose loss stayed bad.

They lie in the run's metrics.jsonl, one JSON object per line, which is read here too, without torch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.options.training import MAX_STEPS
from megatron.utils.atomic_io import parse_json

METRICS_FILE = "metrics.jsonl"
DIVERGED_KIND = "diverged"
"""The kind of the record that ends a run whose loss stayed bad: with its step, and the reason in one line."""
UNREADABLE_FILE = "metrics.unreadable.txt"
"""In the run's folder: lines of its records that were found damaged, as they were."""
HEARTBEAT_FILE = "heartbeat.json"
"""In the run's folder: where the first rank is, every few seconds while the run is alive."""


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan


@dataclass(frozen=True)
class TrainRecord:
    """An interval of steps up to and including `step`. Values that cannot be known are None."""

    step: int
    loss: float | None  # mean over the interval's steps in nats per token; None if all were skipped
    perplexity: float | None
    learning_rate: float  # of the last step
    grad_norm: float | None  # of the last step that was not skipped, before clipping
    tokens_per_second: float  # of the whole run, all processes together
    ms_per_step: float
    tflops: float  # per device, TFLOP/s
    mfu: float | None  # share of the device's peak
    loss_scale: float
    skipped_steps: int  # since step 0
    memory_gib: float  # the largest of any process
    tokens: int  # consumed since step 0
    seconds_left: float
    data_wait: float = 0.0  # share of the time in which the rank that waited most for its batches did so
    data_wait_rank: int | None = None  # that rank; None of one process
    checkpoint_wait: float = 0.0  # share of the time in which training stood still for checkpoints, this included
    slowest_rank: int | None = None  # whose forward pass took longest, beside its pipeline stage's median
    slowdown: float | None = None  # by which share of that median
    slowest_rank_wait: float = 0.0  # share of a step that the others may wait for that rank
    param_norm: dict[str, float] | None = None  # after the last step, by group and part (log_param_norm)
    update_norm: dict[str, float] | None = None  # of the last step
    cpu_ms_per_step: float | None = None  # of processors, by the first rank; on GPUs what the host does for a step
    z_loss: float | None = None  # mean over the interval's steps, its coefficient included; None without one

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "train", **asdict(self)}


def list_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, those of a mapping in it by `name/key`; without what is not known."""
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            scalars.update((f"{name}/{key}", number) for key, number in value.items())
        elif name not in ("step", "kind") and value is not None:
            scalars[name] = value
    return scalars


@dataclass(frozen=True)
class ValidationRecord:
    """A validation, or the test at the end."""

    step: int
    split: str
    loss: float  # nats per token
    perplexity: float
    tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.split, **{k: v for k, v in asdict(self).items() if k != "split"}}


@dataclass(frozen=True)
class DivergenceRecord:
    """Why a run ended before its last step: its loss or its gradients."""

    step: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"kind": DIVERGED_KIND, **asdict(self)}


def read_metrics_log(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file of records, each with its end and what it says; `find_unreadable_lines` has the others."""
    for line, record in _parse_lines(path):
        if record is not None:
            yield line + "\n", record


def find_unreadable_lines(path: Path) -> dict[int, str]:
    """Lines of a file of records that say nothing, by their number from 1. Half a line at the end is none of them: that
    is what a crash leaves, and a run that goes on writes that record again."""
    lines = list(_parse_lines(path))
    if lines and lines[-1][1] is None and not path.read_bytes().endswith(b"\n"):
        lines.pop()
    return {number: line for number, (line, record) in enumerate(lines, start=1) if record is None}


def describe_damage(path: Path, damaged: Iterable[int]) -> str:
    """Which lines of a file of records are damaged, in words."""
    numbers = [str(number) for number in damaged]
    shown = ", ".join(numbers[:5]) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"{path}: line{'s' * (len(numbers) > 1)} {shown} cannot be read"


def _parse_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    if not path.is_file():
        return
    # Not splitlines: what damage makes of a line may look like its end to Unicode, and is not JSON's.
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        yield line, parse_record(line)


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None for a damaged line.

    A step is a whole number, and nothing that only looks like one: runs are cut off after a step.
    """
    try:
        value = parse_json(line)
    except ValueError:
        return None
    is_record = isinstance(value, dict) and type(value.get("step")) is int and isinstance(value.get("kind"), str)
    return value if is_record and 0 <= value["step"] <= MAX_STEPS else None


def find_divergence(run: str | Path) -> tuple[int, str] | None:
    """Step and reason if a run's training ended because its loss stayed bad, and was not started again since."""
    last = None
    for _, record in read_metrics_log(Path(run) / METRICS_FILE):
        last = record
    if last is None or last["kind"] != DIVERGED_KIND:
        return None
    return int(last["step"]), str(last.get("reason"))


def has_logged_record(run: str | Path, kind: str, step: int) -> bool:
    """Does a run's folder have a record of this kind (train, valid, test) and step?"""
    return any(
        record.get("kind") == kind and record["step"] == step
        for _, record in read_metrics_log(Path(run) / METRICS_FILE)
    )
