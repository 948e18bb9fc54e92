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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint import layout as checkpoints
from megatron.checkpoint.run_folder import check_no_foreign_run_files
from megatron.config.execution import count_ranks_per_replica
from megatron.config.schema import Config
from megatron.config.stages import build_stages, find_longest_length, list_stage_configs, resolve_ranks
from megatron.config.yaml_files import format_value
from megatron.data.blend import MAX_SHOWN, list_corpora, list_dataset_slices, list_split_prefixes
from megatron.options.data import SPLITS, CorpusName, DataOptions, Split, list_corpus_names
from megatron.options.section import MAX_STEPS
from megatron.training.check_resources import check_disk
from megatron.training.harness_loading import (
    check_harness_names,
    check_task_requests,
    load_local_tasks,
    load_training_tasks,
)
from megatron.training.metrics_log import HEARTBEAT_FILE, METRICS_FILE
from megatron.training.reporters import check_reporters
from megatron.training.resolve_run import ResolvedRun
from megatron.training.schedule import describe_late_warmup
from megatron.utils.atomic_io import check_no_file_in_path, check_writable
from megatron.utils.errors import FarfieldError, UserError

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
    config, notes = _resolve_folders(config)
    config, more = _resolve_epochs(config)
    return config, (*notes, *more)


def _resolve_folders(config: Config) -> tuple[Config, list[str]]:
    """Replace folders by the datasets in them, also in stages."""
    notes: list[str] = []
    changes: dict[str, object] = {}
    for split in SPLITS:
        key = f"{split}_data_paths"
        if (names := getattr(config.data, key)) and _names_folder(names):
            changes[key] = _list_datasets(key, names, split, notes)
    if config.data.data_path is not None and _names_folder([config.data.data_path]):
        changes["data_path"] = _list_datasets("data_path", [config.data.data_path], "train", notes)[0]
    if _names_folder([*config.data.valid_data_sets.values()]):
        changes["valid_data_sets"] = {
            name: _list_datasets(f"valid_data_sets.{name}", [corpus], "valid", notes)[0]
            for name, corpus in config.data.valid_data_sets.items()
        }
    key, stages = "train_data_paths", config.training.stages
    if any(_names_folder(stage.get(key, [])) for stage in stages):
        changes["stages"] = [
            {**stage, key: _list_datasets(key, stage[key], "train", notes)} if key in stage else stage
            for stage in stages
        ]
    return config.replace(**changes) if changes else config, notes


def _names_folder(corpora: Sequence[CorpusName]) -> bool:
    names = [name for corpus in corpora for name in list_corpus_names(corpus)]
    return any(Path(name).is_dir() and not Path(f"{name}.idx").is_file() for name in names)


def _list_datasets(key: str, names: Sequence[CorpusName], split: Split, notes: list[str]) -> list[CorpusName]:
    """Return the datasets of each corpus of a key."""
    data = DataOptions.model_validate({"data_path": names[0]} if key == "data_path" else {f"{split}_data_paths": names})
    corpora = [[str(prefix) for prefix in corpus] for corpus in list_corpora(data, split, key)]
    for name, prefixes in zip(names, corpora, strict=True):
        if _names_folder([name]):
            shown = ", ".join(prefixes[:MAX_SHOWN])
            more = f" and {len(prefixes) - MAX_SHOWN} more" if len(prefixes) > MAX_SHOWN else ""
            notes.append(f"{key}: {format_value(name)} is {shown}{more}")
    return [prefixes[0] if len(prefixes) == 1 else prefixes for prefixes in corpora]


def _resolve_epochs(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the `train_iters` of its `train_epochs`, and a line about them."""
    training, epochs = config.training, config.training.train_epochs
    if epochs is None:
        return config, ()
    block, slices = find_longest_length(config), list_dataset_slices(config.data, "train")
    sizes = [dataset_slice.num_tokens() for dataset_slice in slices]
    num_tokens = sum(max(0, int(size * epochs) - 1) // block for size in sizes) * block
    steps = _count_steps(config, num_tokens)
    if steps < 1:
        raise UserError(
            f"train_epochs {epochs:g}: the training text has {sum(sizes):,} tokens, less than one step",
            "train_epochs",
        )
    if training.train_iters and training.train_iters != steps and config.checkpoint.load is None:
        raise UserError(
            f"train_iters is {training.train_iters}, but train_epochs {epochs:g} gives {steps} steps; set only one",
            "train_iters",
        )
    line = f"train_epochs {epochs:g}: {sum(sizes):,} tokens of text give {steps:,} steps"
    weights = [dataset_slice.weight for dataset_slice in slices]
    times = [
        epochs * sum(sizes) * weight / sum(weights) / size for weight, size in zip(weights, sizes, strict=True) if size
    ]
    if any(abs(time / epochs - 1) > MAX_DIFFERENCE for time in times):
        counts = ", ".join(f"{s.dataset.prefix.name} {time:.2f} times" for s, time in zip(slices, times, strict=True))
        line += f"; reads by weight: {counts}"
    config = config.replace(train_iters=training.train_iters or steps)
    return config, (line, *(() if training.train_iters else describe_late_warmup(build_stages(config))))


def _count_steps(config: Config, num_tokens: int) -> int:
    """Return the number of whole steps, over all stages, for which a number of tokens is enough."""
    steps = 0
    for stage in build_stages(config.replace(train_iters=MAX_STEPS)):
        possible = num_tokens // stage.tokens_per_step
        taken = min(possible, stage.end_step - stage.first_step)
        steps, num_tokens = steps + taken, num_tokens - taken * stage.tokens_per_step
        if taken < stage.end_step - stage.first_step:
            break
    return steps


CHECKED_ON_NODES = "facts known only on the training machines: GPUs, memory, CUDA, network, and files not visible here"


def check_data_files(config: Config) -> None:
    """Check that the datasets exist. Raises UserError."""
    for stage_config in (config, *list_stage_configs(config)):
        for split in SPLITS:
            list_split_prefixes(stage_config.data, split)


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


def check_environment(config: Config, *, reads_data: bool = True, has_own_python: bool = True) -> None:
    """Check the files, folders, disk and logins of a run, without torch and without creating anything.

    Args:
        config: resolved configuration (`resolve_run`).
        reads_data: True if this machine sees the data under the paths of the configuration.
        has_own_python: True if the run uses this Python, with its packages and environment.

    Raises:
        UserError: if something is missing, in the way, or too small.
    """
    if reads_data:
        check_data_files(config)
    check_run_folder(config)
    check_disk(config)
    if has_own_python:
        check_reporters(config)
        check_harness_names(config)


@dataclass(frozen=True)
class StartCheck:
    """Result of the checks of a run that can start, as far as this machine can tell."""

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
    has_own_python: bool
    """True if the run uses the packages and logins of this machine, which were checked."""
    has_task_data: bool
    """False if the run will download data of `harness.tasks`, so that their requests were not checked."""


def check_start(
    resolved: ResolvedRun,
    *,
    needs_data: bool = True,
    has_own_python: bool = True,
    is_local: bool = True,
    reads_tokens: bool = True,
    may_download: bool = True,
) -> StartCheck:
    """Check everything that a run checks before its first step, without creating anything.

    Args:
        resolved: resolved run.
        needs_data: True to raise an error if the data cannot be read here; otherwise `missing_data` gives the reason.
        has_own_python: True if the run uses this Python, with its packages and environment.
        is_local: True if the run takes place on this machine, so that its limits apply.
        reads_tokens: True to check the tokens of the datasets as their first use does; otherwise only a sample.
        may_download: False to use only data on this machine, whatever `harness.download` is.

    Raises:
        FarfieldError: the error that the run would raise.
    """
    # A dry run that cannot count GPUs leaves the batch size and stages open.
    config, sizes, _ = resolve_ranks(resolved.config, resolved.world_size or _guess_world_size(resolved.config))
    data_notes: tuple[str, ...] = ()
    missing = None
    try:
        check_data_files(config)
        config, data_notes = resolve_data(config)
    except FarfieldError as error:
        if needs_data:
            raise
        missing = str(error)
    check_environment(config, reads_data=False, has_own_python=has_own_python)
    if is_local and config.checkpoint.save is not None:
        check_writable("save", Path(config.checkpoint.save))

    # importing torch takes seconds
    from megatron.checkpoint.resume import plan_resume
    from megatron.data.datasets import check_index_size, check_slice_contents
    from megatron.distributed.process_groups import ProcessGroups, build_single_process_groups
    from megatron.model.build import build_model
    from megatron.training.engine import check_equal_calls
    from megatron.training.start_plan import check_eval_lengths, check_stages, plan_start

    plan, vocab_size = None, 1
    if missing is None:
        plan = plan_start(config, ProcessGroups(), sizes=sizes, checksums=False)
        vocab_size = plan.vocabulary.size
        if reads_tokens:
            check_slice_contents(plan.slices, plan.vocabulary)
        if is_local and config.data.task is None:
            check_index_size(plan.order)
        started = plan.config
    else:
        resume = plan_resume(config, ProcessGroups(), sizes=sizes, checksums=False)
        resume.check_engine(config, sizes)
        started = resume.stage.config
        resume.check_methods(started.position)
        check_stages(resume)
    model = build_model(
        started.model, started.position, vocab_size, groups=build_single_process_groups(), device="meta"
    )
    check_eval_lengths(started, model.max_length)
    has_task_data = True
    if has_own_python and config.logging.harness.tasks:
        tasks = load_training_tasks(config) if may_download else load_local_tasks(config)
        has_task_data = tasks is not None
        if plan is not None and has_task_data:
            check_task_requests(config, tasks, plan.vocabulary, model)
    if started.model.attention_backend != "auto" or started.launch.device == "cpu":
        check_equal_calls(started, model)  # the choice of `auto` on a GPU is not known yet
    return StartCheck(config, data_notes, plan, model, missing, has_own_python, has_task_data)


def describe_checks(config: Config, *, reads_tasks: bool = True) -> str:
    """Describe the slow parts of `check_start` for a run, for a progress line.

    Args:
        config: configuration of the run.
        reads_tasks: True if this machine has the packages of the run.
    """
    parts = ["data"]
    if config.checkpoint.load is not None:
        parts.append("the checkpoint to start from")
    if reads_tasks and config.logging.harness.tasks:
        parts.append("harness.tasks, which imports lm_eval")
    *others, last = parts
    return f"checking the {', '.join(others)} and {last}" if others else f"checking the {last}"


def _guess_world_size(config: Config) -> int:
    """Return the number of processes implied by the batch sizes, or that of one replica if they leave it open."""
    training = config.training
    given = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= training.model_fields_set
    product = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
    has_batch = given and training.train_batch_size is not None
    return count_ranks_per_replica(config) * (max(1, (training.train_batch_size or 0) // product) if has_batch else 1)
