"""Trackers, which show the records of many runs on one page: Weights & Biases, and Trackio.

Both write files only, unless a key names the network. A run has an id there, which is stored in its folder, so that a
resumed run continues its curves.
"""

import contextlib
import importlib.util
import io
import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from megatron.config.schema import Config
from megatron.options.output import LoggingOptions
from megatron.training.metrics_log import (
    DIVERGED_KIND,
    DivergenceRecord,
    TaskRecord,
    TrainRecord,
    ValidationRecord,
    list_scalars,
)
from megatron.utils.errors import RunError, UserError

STEP_METRIC = "step"
"""Metric of Weights & Biases with the step of the run."""
TRACKIO_DESTINATIONS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Environment variables that make Trackio send records over the network."""


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
