"""Outputs of records besides the console: metrics.jsonl, TensorBoard, and trackers (`trackers.py`).

A resumed run continues its files. Records after the step from which it resumes are removed, so that no step occurs
twice. Trackers cannot remove records, so the run starts again there under a new id, with the records that are kept.
Only TensorBoard's writer imports torch.
"""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron.config.schema import Config
from megatron.training.metrics_log import (
    METRICS_FILE,
    UNREADABLE_FILE,
    DivergenceRecord,
    TaskRecord,
    TrainRecord,
    ValidationRecord,
    describe_damage,
    find_unreadable_lines,
    list_scalars,
    read_metrics_log,
)
from megatron.training.trackers import Trackio, WeightsAndBiases, check_trackio, check_wandb
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import RunError, UserError, describe_cause

NO_TENSORBOARD = (
    "use_tensorboard: tensorboard is not installed; run `pip install tensorboard`, or set use_tensorboard to false"
)


RunRecord = TrainRecord | ValidationRecord | TaskRecord | DivergenceRecord
"""Record that reporters accept."""


class Reporter(Protocol):
    """Output of records."""

    def report_training(self, record: TrainRecord) -> None: ...
    def report_validation(self, record: ValidationRecord | TaskRecord) -> None: ...
    def report_divergence(self, record: DivergenceRecord) -> None: ...
    def close(self) -> None: ...


def build_reporters(
    config: Config, first_step: int, log: Callable[[str], object] = lambda line: None
) -> list[Reporter]:
    """Build the reporters of a configuration. Call this in the first process only.

    Args:
        config: configuration of the run. Without `save` only explicitly named folders are written.
        first_step: step from which the run starts: 0 or the step of a checkpoint.
        log: called with a line for the user.

    Raises:
        UserError: if a requested package is not installed.
        RunError: if a file cannot be written.
    """
    options, run = config.logging, config.checkpoint.save
    reporters: list[Reporter] = []
    past: list[dict[str, Any]] | None = None
    if run is not None:
        metrics = Path(run) / METRICS_FILE
        has_tracker = options.use_wandb or options.use_trackio
        records = [record for _, record in read_metrics_log(metrics)] if has_tracker else []
        if any(record["step"] > first_step for record in records):
            past = [record for record in records if record["step"] <= first_step]
        reporters.append(JsonLines(metrics, first_step))
    events = options.tensorboard_dir or (os.path.join(run, "tensorboard") if run is not None else None)
    if options.use_tensorboard and events is not None:
        reporters.append(TensorBoard(events, first_step))
    for is_used, key, tracker in (
        (options.use_wandb, "use_wandb", WeightsAndBiases),
        (options.use_trackio, "use_trackio", Trackio),
    ):
        if is_used:
            reporters.append(tracker(config, past))
            if past is not None:
                log(f"{key}: discarding the steps after {first_step}; {tracker.title} starts a new run without them")
    return reporters


def check_reporters(config: Config) -> None:
    """Check that the packages and the login of the reporters are available, without importing the packages.

    Raises:
        UserError: if a package is not installed, or an online run has no login.
    """
    options = config.logging
    has_folder = options.tensorboard_dir is not None or config.checkpoint.save is not None
    if options.use_tensorboard and has_folder and importlib.util.find_spec("tensorboard") is None:
        raise UserError(NO_TENSORBOARD)
    check_wandb(options)
    check_trackio(options)


def archive_damaged_lines(run: Path) -> list[str]:
    """Save the damaged lines of a run's records, which `JsonLines` would drop. Return lines for the user.

    Raises RunError if a file cannot be written.
    """
    damaged = find_unreadable_lines(run / METRICS_FILE)
    if not damaged:
        return []
    try:
        with open(run / UNREADABLE_FILE, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in damaged.values())
    except OSError as error:
        raise RunError(f"{run / UNREADABLE_FILE}: cannot be written ({describe_cause(error)})") from None
    return [f"{describe_damage(run / METRICS_FILE, damaged)}; moved to {run / UNREADABLE_FILE}"]


class JsonLines:
    """Reporter that writes one JSON object per line and record. Numbers missing in JSON (infinity, NaN) become null."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            past = [line for line, record in read_metrics_log(path) if first_step and record["step"] <= first_step]
            write_text_atomically(path, "".join(past))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror or error})") from None

    def report_training(self, record: TrainRecord) -> None:
        self._write(record.to_dict())

    def report_validation(self, record: ValidationRecord | TaskRecord) -> None:
        self._write(record.to_dict())

    def report_divergence(self, record: DivergenceRecord) -> None:
        self._write(record.to_dict())

    def _write(self, values: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(_drop_infinities(values), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror or error})") from None

    def close(self) -> None:
        self._file.close()


def _drop_infinities(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by null."""
    if isinstance(value, dict):
        return {key: _drop_infinities(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Reporter that writes scalars named train/loss, valid/perplexity and so on, over steps."""

    def __init__(self, folder: str, first_step: int) -> None:
        self._folder = folder
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(NO_TENSORBOARD) from None
        try:
            # purge_step hides what an earlier session wrote after the step from which the run resumes.
            self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else None)
        except OSError as error:
            raise RunError(f"{folder}: cannot be written ({error.strerror or error})") from None

    def report_training(self, record: TrainRecord) -> None:
        self._write_scalars("train", record.to_dict())

    def report_validation(self, record: ValidationRecord | TaskRecord) -> None:
        values = record.to_dict()
        self._write_scalars(values["kind"], values)

    def report_divergence(self, record: DivergenceRecord) -> None:
        with self._describe_errors():
            self._writer.add_text("diverged", record.reason, record.step)

    def _write_scalars(self, group: str, values: dict[str, Any]) -> None:
        with self._describe_errors():
            for name, value in list_scalars(values).items():
                self._writer.add_scalar(f"{group}/{name}", value, values["step"])

    def close(self) -> None:
        with self._describe_errors():
            self._writer.close()

    @contextmanager
    def _describe_errors(self) -> Iterator[None]:
        """Raise RunError if TensorBoard's thread could not write."""
        try:
            yield
        except OSError as error:
            raise RunError(f"{self._folder}: cannot be written ({error.strerror or error})") from None


def report_to_all(reporters: Sequence[Reporter], record: RunRecord) -> None:
    """Pass a record to every reporter."""
    for reporter in reporters:
        match record:
            case TrainRecord():
                reporter.report_training(record)
            case ValidationRecord() | TaskRecord():
                reporter.report_validation(record)
            case DivergenceRecord():
                reporter.report_divergence(record)
