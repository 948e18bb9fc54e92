"""Checks that a run makes before its first step, and the values of its configuration that the data determine.

The checks run where the run is started, before it waits in a queue.

    check_environment   files, folders, disk and logins, in a second and without torch. Every start begins with it:
                         training on this machine, a dry run, a SLURM submission and the runs of a sweep.
    check_start          everything else that the ranks of a run check before they train: it builds a `StartPlan`, as
                         they do. Training on this machine leaves it to the ranks, so that no work is done twice.

Facts that only the training machines know stay unchecked (`CHECKED_ON_NODES`).

`resolve_data` replaces folders by their datasets, and `train_epochs` by a number of steps. The stored configuration of
a run names the datasets in a folder at the start, so that a dataset added later is noticed when the run resumes.

An epoch has as many sequences as all training datasets together. Steps are rounded down, so that nothing is read more
often than requested. A run keeps the number of steps with which it started (`megatron.checkpoint.resume`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint import layout as checkpoints
from megatron.checkpoint.run_folder import check_no_foreign_run_files, check_run_writable
from megatron.config.execution import ResolvedRun, build_stages, count_steps
from megatron.config.schema import Config
from megatron.config.stages import find_longest_length
from megatron.config.yaml_files import format_value
from megatron.data.blend import DatasetSlice, format_names, iter_corpora, list_dataset_slices
from megatron.data.document_starts import describe_crossing_fraction, estimate_crossing_fraction
from megatron.options.data import CorpusName, DataOptions, list_corpus_names
from megatron.training.check_resources import check_disk
from megatron.training.harness_loading import (
    check_harness_names,
    check_task_requests,
    load_local_tasks,
    load_training_tasks,
)
from megatron.training.metrics_log import HEARTBEAT_FILE, METRICS_FILE
from megatron.training.reporters import check_reporters
from megatron.training.schedule import describe_late_warmup
from megatron.utils.atomic_io import NAME_ANOTHER, check_no_file_in_path, check_writable
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.formatting import format_quantity

if TYPE_CHECKING:
    from megatron.model.gpt import GPT
    from megatron.training.start_plan import StartPlan

MAX_DIFFERENCE = 0.01
"""Relative difference between the reads of a dataset and train_epochs above which a line reports it."""


def resolve_data(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the datasets of its folders and the `train_iters` of its `train_epochs`, and notes.

    Args:
        config: resolved configuration (`resolve_run`). Without folders and train_epochs nothing changes.

    Raises:
        UserError: if datasets are missing or truncated, the tokens are fewer than one step, or train_iters disagrees.
    """
    keys, notes = _list_datasets(config)
    config = config.replace(**keys) if keys else config
    training, epochs = config.training, config.training.train_epochs
    if epochs is None:
        return config, tuple(notes)
    slices = list_dataset_slices(config.data, "train")
    sizes = [each.num_tokens() for each in slices]
    reads, block = _describe_reads(slices, sizes, epochs), find_longest_length(config)
    steps = count_steps(config, sum(max(0, int(size * epochs) - 1) // block for size in sizes) * block)
    if steps < 1:
        raise UserError(
            f"train_epochs {epochs:g}: the training text has {format_quantity(sum(sizes), 'token')}, "
            "less than one step",
            "train_epochs",
        )
    if training.train_iters and training.train_iters != steps and config.checkpoint.load is None:
        raise UserError(
            f"train_iters is {training.train_iters}, but train_epochs {epochs:g} gives "
            f"{format_quantity(steps, 'step')}; set only one",
            "train_iters",
        )
    notes.append(f"train_epochs {epochs:g}: {sum(sizes):,} tokens of text give {format_quantity(steps, 'step')}{reads}")
    if not training.train_iters:
        config = config.replace(train_iters=steps)
        notes += describe_late_warmup(build_stages(config))
    return config, tuple(notes)


def _list_datasets(config: Config) -> tuple[dict[str, Any], list[str]]:
    """List the datasets of a run, and return the keys that name folders with the datasets in them, and notes.

    Raises UserError if one does not exist.
    """
    keys, notes = _replace_folders(config.data)
    key, stages = "train_data_paths", []
    for stage in config.training.stages:
        found, more = _replace_folders(DataOptions(train_data_paths=stage[key])) if key in stage else ({}, [])
        stages.append({**stage, **found})
        notes += more
    if stages != config.training.stages:
        keys["stages"] = stages
    return keys, notes


def _replace_folders(data: DataOptions) -> tuple[dict[str, Any], list[str]]:
    """List all datasets, and return the keys that name folders with the datasets in them, and notes."""
    keys: dict[str, Any] = {}
    notes: list[str] = []
    for key, names, corpora in iter_corpora(data):
        if not any(map(_names_folder, names)):
            continue
        found: list[CorpusName] = []
        for name, corpus in zip(names, corpora, strict=True):
            prefixes = [str(prefix) for prefix in corpus]
            found.append(prefixes[0] if len(prefixes) == 1 else prefixes)
            if _names_folder(name):
                notes.append(f"{key}: {format_value(name)} is {format_names(corpus)}")
        section, _, validation_set = key.partition(".")
        if validation_set:
            keys[section] = keys.get(section, data.valid_data_sets) | {validation_set: found[0]}
        else:
            keys[section] = found[0] if key == "data_path" else found
    return keys, notes


def _names_folder(corpus: CorpusName) -> bool:
    return any(Path(name).is_dir() and not Path(f"{name}.idx").is_file() for name in list_corpus_names(corpus))


def _describe_reads(slices: Sequence[DatasetSlice], sizes: Sequence[int], epochs: float) -> str:
    """Describe how often each dataset is read, if weights make it differ from the number of epochs."""
    total = sum(each.weight for each in slices)
    times = [
        (each.dataset.prefix.name, epochs * sum(sizes) * each.weight / total / size)
        for each, size in zip(slices, sizes, strict=True)
        if size
    ]
    if not any(abs(time / epochs - 1) > MAX_DIFFERENCE for _, time in times):
        return ""
    return f"; reads by weight: {', '.join(f'{name} {time:.2f} times' for name, time in times)}"


CHECKED_ON_NODES = "facts known only on the training machines: GPUs, memory, CUDA, network, and files not visible here"


def check_data_files(config: Config) -> None:
    """Check that the datasets exist. Raises UserError."""
    _list_datasets(config)


def check_run_folder(config: Config) -> None:
    """Check the folder of a run before anything is written there. Raises UserError.

    Foreign files in the folder, a folder of another run, and a `load` without a checkpoint are errors.
    """
    options = config.checkpoint
    check_no_foreign_run_files(options.save, (METRICS_FILE, HEARTBEAT_FILE))
    if options.load is not None:
        if options.save is None or os.path.abspath(options.load) != os.path.abspath(options.save):
            try:
                checkpoints.resolve_checkpoint_path(options.load)
            except UserError as error:
                raise UserError(f"load: {error}") from None
    elif options.save is not None:
        with suppress(OSError):  # an unusable folder is an error when it is created
            check_no_file_in_path("save", Path(options.save))
            checkpoints.check_run_is_new(options.save, checkpoints.find_latest_checkpoint(options.save))


def _check_output_folders(config: Config) -> None:
    """Check that a run can write to its folders. Raises UserError as `check_writable`."""
    save, events, cache = config.checkpoint.save, config.logging.tensorboard_dir, config.data.data_cache
    if save is not None:
        check_run_writable("save", Path(save), NAME_ANOTHER)
    if config.logging.use_tensorboard and events is not None:
        check_writable("tensorboard_dir", Path(events))
    if cache is not None and not Path(cache).exists():  # an existing one may contain the sample index
        check_writable("data_cache", Path(cache))


@dataclass(frozen=True)
class TrainingMachines:
    """Relation of the machines that train to this one, which decides what can be checked here."""

    is_local: bool = True
    """True if the run takes place on this machine, so that its limits apply."""
    shares_files: bool = True
    """True if the run sees the data under the paths of this machine."""
    shares_python: bool = True
    """True if the run uses this Python, with its packages, environment and logins."""


def check_environment(resolved: ResolvedRun, machines: TrainingMachines, *, reads_data: bool = True) -> None:
    """Check the files, folders, disk and logins of a run, without torch and without creating anything.

    Args:
        resolved: resolved run.
        machines: machines that train.
        reads_data: False if the data were checked before.

    Raises:
        UserError: if something is missing, in the way, or too small.
    """
    config = resolved.config
    if reads_data and machines.shares_files:
        check_data_files(config)
    check_run_folder(config)
    if machines.is_local:
        _check_output_folders(config)
    check_disk(resolved)
    if machines.shares_python:
        check_reporters(config)
        check_harness_names(config)


@dataclass(frozen=True)
class StartCheck:
    """Result of the checks of a run that can start, as far as this machine can tell."""

    machines: TrainingMachines
    config: Config
    """Configuration with the values that the data determine. If a dry run left the batch size open, one is assumed."""
    data_notes: tuple[str, ...]
    """Lines about values that the data determined."""
    plan: StartPlan | None
    """Start plan, or None if the data are not on this machine."""
    model: GPT
    """Model on the meta device, with the smallest vocabulary if the data are not on this machine."""
    missing_data: str | None
    """Reason why the data could not be read on this machine, or None."""
    has_task_data: bool
    """False if the run will download data of `harness.tasks`, so that their requests were not checked."""

    def describe_stages(self) -> tuple[str, ...]:
        """Return a line for each of the run's stages, if it has several."""
        stages = () if self.plan is None else self.plan.resume.stages
        return tuple(stage.describe(len(stages)) for stage in stages) if len(stages) > 1 else ()

    def describe_start(self) -> list[str]:
        """Return lines on the starting point, rows with several documents, and data not yet downloaded."""
        lines = []
        if (plan := self.plan) is not None:
            lines += [*plan.resume.notes, *plan.notes]
            if plan.config.data.task is None:
                share = estimate_crossing_fraction(plan.slices.get("train", []), plan.config.model.seq_length)
                lines += describe_crossing_fraction(plan.config.position.attention_mask, share)
        if not self.has_task_data:
            lines.append(
                "harness.tasks: training downloads the data that are not on this machine, and then checks the requests"
            )
        return lines

    def describe_parameter_groups(self) -> tuple[str, ...]:
        """Return lines with the algorithm of each parameter group."""
        from megatron.training.optimizer import describe_parameter_groups  # importing torch takes seconds

        unknown = " (for the smallest vocabulary, because the real one is unknown here)" if self.plan is None else ""
        return (f"parameters{unknown}:", *describe_parameter_groups(self.config, self.model))

    def describe_unchecked(self) -> tuple[str, ...]:
        """Return lines about checks that only the training machines can make."""
        lines = [f"the data must exist there; not found here: {self.missing_data}"] if self.missing_data else []
        logging = self.config.logging
        for key in ("use_wandb", "use_trackio") if not self.machines.shares_python else ():
            if getattr(logging, key):
                lines.append(f"{key}: its package and login are checked only there")
        if logging.harness.tasks and (self.plan is None or not self.machines.shares_python):
            what = "requests" if self.machines.shares_python else "package, data and requests"
            lines.append(f"harness.tasks: their {what} are checked only there")
        return (f"not checked: {CHECKED_ON_NODES}", *lines)


def check_start(
    resolved: ResolvedRun,
    machines: TrainingMachines,
    *,
    reads_tokens: bool = True,
    may_download: bool = True,
) -> StartCheck:
    """Check everything that a run checks before its first step, without creating anything.

    Args:
        resolved: resolved run.
        machines: machines that train. If they do not share this machine's files, data that cannot be read here are not
            an error, and `missing_data` gives the reason.
        reads_tokens: True to check the tokens of the datasets as their first use does; otherwise only a sample.
        may_download: False to use only data on this machine, whatever `harness.download` is.

    Raises:
        FarfieldError: the error that the run would raise.
    """
    config, sizes = resolved.config, resolved.sizes
    data_notes: tuple[str, ...] = ()
    missing = None
    try:
        config, data_notes = resolve_data(config)
    except FarfieldError as error:
        if machines.shares_files:
            raise
        missing = str(error)
    check_environment(replace(resolved, config=config), machines, reads_data=False)
    # importing torch takes seconds
    from megatron.data.datasets import check_index_size, check_slice_contents
    from megatron.distributed.process_groups import ProcessGroups, build_single_process_groups
    from megatron.model.build import build_model
    from megatron.training.engine import check_equal_calls
    from megatron.training.start_plan import check_eval_lengths, plan_checkpoint, plan_start

    plan, vocab_size = None, 1
    if missing is None:
        plan = plan_start(config, ProcessGroups(), sizes=sizes, checksums=False)
        vocab_size = plan.vocabulary.size
        if reads_tokens:
            check_slice_contents(plan.slices, plan.vocabulary)
        if machines.is_local and config.data.task is None:
            check_index_size(plan.order)
        started = plan.config
    else:
        started = plan_checkpoint(config, ProcessGroups(), sizes=sizes, checksums=False)[0].stage.config
    model = build_model(
        started.model, started.position, vocab_size, groups=build_single_process_groups(), device="meta"
    )
    check_eval_lengths(started, model.max_length)
    has_task_data = True
    if machines.shares_python and config.logging.harness.tasks:
        tasks = load_training_tasks(config) if may_download else load_local_tasks(config)
        has_task_data = tasks is not None
        if plan is not None and has_task_data:
            check_task_requests(config, tasks, plan.vocabulary, model)
    if started.model.attention_backend != "auto" or started.launch.device == "cpu":
        check_equal_calls(started, model)  # the choice of `auto` on a GPU is not known yet
    return StartCheck(machines, config, data_notes, plan, model, missing, has_task_data)


def describe_checks(config: Config, machines: TrainingMachines) -> str:
    """Describe the slow parts of `check_start` for a progress line."""
    parts = ["data"]
    if config.checkpoint.load is not None:
        parts.append("the checkpoint to start from")
    if machines.shares_python and config.logging.harness.tasks:
        parts.append("harness.tasks, which imports lm_eval")
    *others, last = parts
    return f"checking the {', '.join(others)} and {last}" if others else f"checking the {last}"
