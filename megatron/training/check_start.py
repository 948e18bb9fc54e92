"""Checks that a run makes before its first step. They run where the run is started, before it waits in a queue.

    check_environment   files, folders, disk and logins, in a second and without torch. Every start begins with it:
                         training on this machine, a dry run, a SLURM submission and the runs of a sweep.
    check_start          everything else that the ranks of a run check before they train: it builds a `StartPlan`, as
                         they do. Training on this machine leaves it to the ranks, so that no work is done twice.

Facts that only the training machines know stay unchecked (`CHECKED_ON_NODES`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint import layout as checkpoints
from megatron.checkpoint.run_folder import check_no_foreign_run_files
from megatron.config.parallelism import count_ranks_per_replica, resolve_batch_size, resolve_mesh_shape
from megatron.config.schema import Config
from megatron.config.stages import list_stage_configs, resolve_stages
from megatron.data.blend import list_split_prefixes
from megatron.options.data import SPLITS
from megatron.training.check_resources import check_disk
from megatron.training.metrics_log import HEARTBEAT_FILE, METRICS_FILE
from megatron.training.reporters import check_reporters
from megatron.training.resolve_data import resolve_data
from megatron.training.resolve_run import ResolvedRun
from megatron.utils.atomic_io import check_no_file_in_path, check_writable
from megatron.utils.errors import FarfieldError, UserError

if TYPE_CHECKING:
    from megatron.model.gpt import GPT
    from megatron.training.start_plan import StartPlan

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


@dataclass(frozen=True)
class StartCheck:
    """Result of the checks of a run that can start, as far as this machine can tell."""

    config: Config
    """Configuration with the values that the data determine, and with a batch size if it was left open."""
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


def check_start(
    resolved: ResolvedRun,
    *,
    needs_data: bool = True,
    has_own_python: bool = True,
    is_local: bool = True,
    reads_tokens: bool = True,
) -> StartCheck:
    """Check everything that a run checks before its first step, without creating anything.

    Args:
        resolved: resolved run.
        needs_data: True to raise an error if the data cannot be read here; otherwise `missing_data` gives the reason.
        has_own_python: True if the run uses this Python, with its packages and environment.
        is_local: True if the run takes place on this machine, so that its limits apply.
        reads_tokens: True to check the tokens of the datasets as their first use does; otherwise only a sample.

    Raises:
        FarfieldError: the error that the run would raise.
    """
    config = _resolve_batch_sizes(resolved)
    data_notes: tuple[str, ...] = ()
    sizes = resolve_mesh_shape(config, _count_ranks(config, resolved.world_size))
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
    if started.model.attention_backend != "auto" or started.launch.device == "cpu":
        check_equal_calls(started, model)  # the choice of `auto` on a GPU is not known yet
    return StartCheck(config, data_notes, plan, model, missing, has_own_python)


def _resolve_batch_sizes(resolved: ResolvedRun) -> Config:
    """Return the configuration with a batch size and stages, which a dry run leaves open if it cannot count GPUs."""
    config = resolved.config
    if resolved.world_size is not None:
        return config
    return resolve_stages(resolve_batch_size(config, _guess_data_ranks(config)))


def _guess_data_ranks(config: Config) -> int:
    """Return the number of data-parallel ranks implied by the batch sizes, or 1 if they leave it open."""
    training = config.training
    given = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= training.model_fields_set
    product = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
    return max(1, training.train_batch_size // product) if given and training.train_batch_size is not None else 1


def _count_ranks(config: Config, world_size: int | None) -> int:
    """Return the number of processes of a run, derived from the batch sizes if a dry run leaves it open."""
    return world_size or _guess_data_ranks(config) * count_ranks_per_replica(config)
