"""Outputs of records besides the console: metrics.jsonl, TensorBoard, and trackers.

A resumed run continues its files. Records after the step from which it resumes are removed, so that no step occurs
twice. Only TensorBoard's writer imports torch.

Trackers (Weights & Biases, Trackio) show the records of many runs on one page. Both write files only, unless a key
names the network. A run has an id there, which is stored in its folder, so that a resumed run continues its curves.
Trackers cannot remove records, so a run that was rolled back starts again under a new id, with the records that are
kept.
"""

import contextlib
import importlib.util
import io
import json
import math
import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from megatron.config.schema import Config
from megatron.options.output import LoggingOptions
from megatron.training.metrics_log import (
    DIVERGED_KIND,
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
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import RunError, UserError, describe_cause

NO_TENSORBOARD = (
    "use_tensorboard: tensorboard is not installed; run `pip install tensorboard`, or set use_tensorboard to false"
)
STEP_METRIC = "step"
"""Metric of Weights & Biases with the step of the run."""
TRACKIO_DESTINATIONS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Environment variables that make Trackio send records over the network."""

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
    records: list[dict[str, Any]] = []
    if run is not None:
        metrics = Path(run) / METRICS_FILE
        records = [record for _, record in read_metrics_log(metrics)]
        reporters.append(JsonLines(metrics, first_step))
    kept = [record for record in records if _is_kept(record, first_step)]
    past = kept if len(kept) < len(records) else None
    events = options.tensorboard_dir or (os.path.join(run, "tensorboard") if run is not None else None)
    if options.use_tensorboard and events is not None:
        # A run without records may share the folder with others, whose events stay visible.
        reporters.append(TensorBoard(events, first_step + 1 if first_step else 0 if records else None))
    for is_used, key, tracker in (
        (options.use_wandb, "use_wandb", WeightsAndBiases),
        (options.use_trackio, "use_trackio", Trackio),
    ):
        if is_used:
            reporters.append(tracker(config, past))
            if past is not None:
                log(f"{key}: discarding the steps after {first_step}; {tracker.title} starts a new run without them")
    return reporters


def _is_kept(record: Mapping[str, Any], first_step: int) -> bool:
    """Return True if a run that starts after `first_step` keeps an earlier record. A start at step 0 keeps none."""
    return 0 < first_step >= record["step"]


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


def _describe_missing(package: str) -> str:
    return f"use_{package}: {package} is not installed; run `pip install {package}`, or set use_{package} to false"


def check_wandb(options: LoggingOptions) -> None:
    """Check that Weights & Biases can be used, without importing it.

    Raises UserError if its package is not installed, or an online run has no login.
    """
    if not options.use_wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError(_describe_missing("wandb"))
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


def check_trackio(options: LoggingOptions) -> None:
    """Check that Trackio can be used, without importing it.

    Raises UserError if its package is not installed, or if an environment variable alone enables the network.
    """
    if not options.use_trackio:
        return
    if importlib.util.find_spec("trackio") is None:
        raise UserError(_describe_missing("trackio"))
    for name in TRACKIO_DESTINATIONS if options.trackio_space is None else ():
        if os.environ.get(name):
            raise UserError(
                f"use_trackio: {name} is set, so Trackio would send records over the network; unset it, or set "
                "trackio_space"
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
        with _describe_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            past = [line for line, record in read_metrics_log(path) if _is_kept(record, first_step)]
            write_text_atomically(path, "".join(past))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def report_training(self, record: TrainRecord) -> None:
        self._write(record.to_dict())

    def report_validation(self, record: ValidationRecord | TaskRecord) -> None:
        self._write(record.to_dict())

    def report_divergence(self, record: DivergenceRecord) -> None:
        self._write(record.to_dict())

    def _write(self, values: dict[str, Any]) -> None:
        with _describe_write_errors(self.path):
            self._file.write(json.dumps(_drop_infinities(values), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with _describe_write_errors(self.path):  # a line that could not be written is tried again
            self._file.close()


@contextmanager
def _describe_write_errors(path: str | Path) -> Iterator[None]:
    """Raise RunError with the path if a reporter, or TensorBoard's thread, could not write."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror or error})") from None


def _drop_infinities(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by null."""
    if isinstance(value, dict):
        return {key: _drop_infinities(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Reporter that writes scalars named train/loss, valid/perplexity and so on, over steps.

    Args:
        folder: folder of the events.
        purge_step: step from which on the events of earlier sessions are hidden; None hides none.
    """

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self._folder = folder
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(NO_TENSORBOARD) from None
        with _describe_write_errors(folder):
            self._writer = SummaryWriter(folder, purge_step=purge_step)

    def report_training(self, record: TrainRecord) -> None:
        self._write_scalars("train", record.to_dict())

    def report_validation(self, record: ValidationRecord | TaskRecord) -> None:
        values = record.to_dict()
        self._write_scalars(values["kind"], values)

    def report_divergence(self, record: DivergenceRecord) -> None:
        with _describe_write_errors(self._folder):
            self._writer.add_text("diverged", record.reason, record.step)

    def _write_scalars(self, group: str, values: dict[str, Any]) -> None:
        with _describe_write_errors(self._folder):
            for name, value in list_scalars(values).items():
                self._writer.add_scalar(f"{group}/{name}", value, values["step"])

    def close(self) -> None:
        with _describe_write_errors(self._folder):
            self._writer.close()


class Tracker:
    """Reporter for a tracker.

    Args:
        config: configuration of the run.
        past: records with which to start a new run if the old one has steps that were rolled back; None continues it.
    """

    title: ClassVar[str]
    """Name of the tracker for the user."""

    def __init__(self, config: Config, past: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._open(config, is_new=past is not None)
        for record in past or ():
            if record["kind"] != DIVERGED_KIND:
                self._log(record["kind"], record)

    def report_training(self, record: TrainRecord) -> None:
        self._log("train", record.to_dict())

    def report_validation(self, record: ValidationRecord | TaskRecord) -> None:
        values = record.to_dict()
        self._log(values["kind"], values)

    def _log(self, group: str, values: Mapping[str, Any]) -> None:
        self._log_scalars(values["step"], {f"{group}/{name}": value for name, value in list_scalars(values).items()})

    def _open(self, config: Config, *, is_new: bool) -> None:
        """Start or continue the run."""
        raise NotImplementedError

    def _log_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Send numbers of a step by name."""
        raise NotImplementedError


class WeightsAndBiases(Tracker):
    """Reporter for Weights & Biases; offline (files only) unless `wandb_mode` is online.

    The step counter of Weights & Biases ignores values for earlier steps. The step is therefore a metric, over which
    all others are plotted.
    """

    title = "Weights & Biases"

    def _open(self, config: Config, *, is_new: bool) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(_describe_missing("wandb")) from None
        options, run = config.logging, config.checkpoint.save
        folder = Path(run) if run is not None else Path.cwd()
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                group=options.wandb_group,
                entity=options.wandb_team,
                mode=options.wandb_mode,
                name=folder.name if run is not None else None,
                id=_read_run_id(folder, "wandb", is_new=is_new) if run is not None else None,
                resume="allow",
                dir=folder,
                config=config.to_flat(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:  # wandb.errors.Error and network errors
            raise RunError(f"use_wandb: {str(error).splitlines()[0]}") from None
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric("*", step_metric=STEP_METRIC)

    def _log_scalars(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({STEP_METRIC: step, **scalars})

    def report_divergence(self, record: DivergenceRecord) -> None:
        self._run.summary["diverged"] = f"step {record.step}: {record.reason}"

    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """Reporter for Trackio; local files only (TRACKIO_DIR) unless `trackio_space` is set.

    Trackio finds a run by its name, and prints to standard output, which belongs to the run's own lines.
    """

    title = "Trackio"

    def _open(self, config: Config, *, is_new: bool) -> None:
        try:
            import trackio
        except ImportError:
            raise UserError(_describe_missing("trackio")) from None
        options, run = config.logging, config.checkpoint.save
        check_trackio(options)
        self._trackio = trackio
        name = None
        if run is not None:
            name = f"{Path(run).name}-{_read_run_id(Path(run), 'trackio', is_new=is_new)}"
        try:
            with _drop_output():
                self._run = trackio.init(
                    project=options.trackio_project,
                    name=name,
                    space_id=options.trackio_space,
                    config=config.to_flat(),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # errors of its database, of a login and of the network
            raise RunError(f"use_trackio: {next(iter(str(error).splitlines()), type(error).__name__)}") from None

    def _log_scalars(self, step: int, scalars: dict[str, float]) -> None:
        with _drop_output():
            self._run.log(scalars, step=step)

    def report_divergence(self, record: DivergenceRecord) -> None:
        with _drop_output():
            self._run.alert(title="diverged", text=record.reason, step=record.step)

    def close(self) -> None:
        with _drop_output():
            self._trackio.finish()  # not the run's own, which leaves it to be finished again at exit


def _drop_output() -> contextlib.redirect_stdout[io.StringIO]:
    return contextlib.redirect_stdout(io.StringIO())


def _read_run_id(run: Path, tracker: str, *, is_new: bool) -> str:
    """Return the id of a run, stored in its folder so that a resumed run continues the same curves."""
    path = run / tracker / "id.txt"
    if path.is_file() and not is_new:
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = secrets.token_hex(4)
    path.write_text(fresh + "\n", encoding="utf-8")
    return fresh


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
