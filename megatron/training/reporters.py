"""Outputs of records besides the console: metrics.jsonl, TensorBoard, Weights & Biases.

A resumed run continues its files. Records after the step from which it resumes are removed, so that no step occurs
twice. Weights & Biases cannot remove records, so the run starts again there under a new id, with the records that are
kept. Only TensorBoard's writer imports torch.
"""

import importlib.util
import json
import math
import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from megatron.config.schema import Config
from megatron.options.output import LoggingOptions
from megatron.training.metrics_log import (
    DIVERGED_KIND,
    METRICS_FILE,
    UNREADABLE_FILE,
    DivergenceRecord,
    TrainRecord,
    ValidationRecord,
    describe_damage,
    find_unreadable_lines,
    list_scalars,
    read_metrics_log,
)
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import RunError, UserError, describe_cause

STEP_METRIC = "step"
"""Metric of Weights & Biases with the step of the run."""
NO_TENSORBOARD = (
    "use_tensorboard: tensorboard is not installed; run `pip install tensorboard`, or set use_tensorboard to false"
)


class Reporter(Protocol):
    """Output of records."""

    def train(self, record: TrainRecord) -> None: ...
    def evaluation(self, record: ValidationRecord) -> None: ...
    def divergence(self, record: DivergenceRecord) -> None: ...
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
        records = [record for _, record in read_metrics_log(metrics)] if options.use_wandb else []
        if any(record["step"] > first_step for record in records):
            past = [record for record in records if record["step"] <= first_step]
        reporters.append(JsonLines(metrics, first_step))
    events = options.tensorboard_dir or (os.path.join(run, "tensorboard") if run is not None else None)
    if options.use_tensorboard and events is not None:
        reporters.append(TensorBoard(events, first_step))
    if options.use_wandb:
        reporters.append(WeightsAndBiases(config, past))
        if past is not None:
            log(f"use_wandb: discarding the steps after {first_step}; Weights & Biases starts a new run without them")
    return reporters


def check_reporters(config: Config) -> None:
    """Check that the packages and the login of the reporters are available, without importing the packages.

    Raises:
        UserError: if a package is not installed, or an online run has no login to Weights & Biases.
    """
    options = config.logging
    has_folder = options.tensorboard_dir is not None or config.checkpoint.save is not None
    if options.use_tensorboard and has_folder and importlib.util.find_spec("tensorboard") is None:
        raise UserError(NO_TENSORBOARD)
    _check_wandb_login(options)


def _check_wandb_login(options: LoggingOptions) -> None:
    if not options.use_wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError("use_wandb: wandb is not installed; run `pip install wandb`, or set use_wandb to false")
    if options.wandb_mode == "offline" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        login = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        login = None
    if login is None:
        raise UserError(
            f"wandb_mode online: no login for {host}: run `wandb login`, set WANDB_API_KEY, or set wandb_mode: offline"
        )


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

    def train(self, record: TrainRecord) -> None:
        self._write(record.as_dict())

    def evaluation(self, record: ValidationRecord) -> None:
        self._write(record.as_dict())

    def divergence(self, record: DivergenceRecord) -> None:
        self._write(record.as_dict())

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

    def train(self, record: TrainRecord) -> None:
        self._scalars("train", record.as_dict())

    def evaluation(self, record: ValidationRecord) -> None:
        self._scalars(record.split, record.as_dict())

    def divergence(self, record: DivergenceRecord) -> None:
        with self._describe_errors():
            self._writer.add_text("diverged", record.reason, record.step)

    def _scalars(self, group: str, values: dict[str, Any]) -> None:
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


class WeightsAndBiases:
    """Reporter for Weights & Biases; offline (files only) unless `wandb_mode` is online.

    The step counter of Weights & Biases ignores values for earlier steps. The step is therefore a metric, over which
    all others are plotted.

    Args:
        config: configuration of the run.
        past: records with which to start a new run if the old one has steps that were rolled back; None continues it.
    """

    def __init__(self, config: Config, past: Sequence[Mapping[str, Any]] | None = None) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "use_wandb: wandb is not installed; run `pip install wandb`, or set use_wandb to false"
            ) from None
        options, run = config.logging, config.checkpoint.save
        folder = Path(run) if run is not None else Path.cwd()
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                group=options.wandb_group,
                entity=options.wandb_team,
                mode=options.wandb_mode,
                name=folder.name if run is not None else None,
                id=_wandb_id(folder, is_new=past is not None) if run is not None else None,
                resume="allow",
                dir=folder,
                config=config.to_flat(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:  # wandb.errors.Error and network errors
            raise RunError(f"use_wandb: {str(error).splitlines()[0]}") from None
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric("*", step_metric=STEP_METRIC)
        for record in past or ():
            if record["kind"] != DIVERGED_KIND:
                self._log(record["kind"], record)

    def train(self, record: TrainRecord) -> None:
        self._log("train", record.as_dict())

    def evaluation(self, record: ValidationRecord) -> None:
        self._log(record.split, record.as_dict())

    def divergence(self, record: DivergenceRecord) -> None:
        self._run.summary["diverged"] = f"step {record.step}: {record.reason}"

    def _log(self, group: str, values: Mapping[str, Any]) -> None:
        scalars = {f"{group}/{name}": value for name, value in list_scalars(values).items()}
        self._run.log({STEP_METRIC: values["step"], **scalars})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run: Path, *, is_new: bool) -> str:
    """Return the id of a run, stored in its folder so that a resumed run continues the same curves."""
    path = run / "wandb" / "id.txt"
    if path.is_file() and not is_new:
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = secrets.token_hex(4)
    path.write_text(fresh + "\n", encoding="utf-8")
    return fresh


def report_to_all(reporters: Sequence[Reporter], record: TrainRecord | ValidationRecord | DivergenceRecord) -> None:
    """Pass a record to every reporter."""
    for reporter in reporters:
        match record:
            case TrainRecord():
                reporter.train(record)
            case ValidationRecord():
                reporter.evaluation(record)
            case DivergenceRecord():
                reporter.divergence(record)
