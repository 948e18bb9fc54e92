"""Training from Python and in the ranks of a run: attempts, each from its checkpoint, until the run ends.

A run in stages (`megatron/config/stages.py`) is rebuilt for each stage from the last checkpoint of the previous one, so
a stage starts exactly like a resumed run. A rollback restarts it in the same way.
"""

import os
import time

from rich.console import Console

from megatron.config.schema import Config
from megatron.config.validation import check_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo, read_launcher_environment
from megatron.training import summary
from megatron.training.check_start import TrainingMachines, check_environment, resolve_data
from megatron.training.console import ConsoleReporter
from megatron.training.loss_guard import Rollback
from megatron.training.profiler import dump_memory_if_exhausted
from megatron.training.resolve_run import resolve_run
from megatron.training.trainer import RollbackRequested, StageEnd, Trainer, TrainingHooks, TrainResult
from megatron.training.training_run import build_training_run
from megatron.training.watchdog import HangHandler
from megatron.utils.errors import RunError, is_out_of_memory


def train(config: Config, console: Console | None = None) -> TrainResult:
    """Train a model from Python, in this process alone or as the rank given by the environment.

    Args:
        config: configuration of any origin; it is validated, and resolved for this machine.
        console: console of the first process; None prints nothing.

    See `train_resolved` for the result and the errors.
    """
    launch_context = read_launcher_environment()
    rank_info = RankInfo()
    if launch_context is not None:
        rank_info = launch_context.rank_info
        os.environ.update(launch_context.to_environment(config.launch.master_port))  # DeepSpeed reads torchrun's names
    check_config(config)
    resolved = resolve_run(config, LocalHardware.detect(), rank_info=rank_info)
    check_environment(resolved, TrainingMachines())
    return train_resolved(resolved.config, rank_info, console)


def train_resolved(
    config: Config,
    rank_info: RankInfo,
    console: Console | None = None,
    on_hang: HangHandler | None = None,
    *,
    stderr_fd: int = 2,
    hooks: TrainingHooks | None = None,
) -> TrainResult:
    """Train a model. Every process of the run calls this with the same configuration.

    Args:
        config: resolved configuration (`resolve_run`).
        rank_info: rank of this process, equal to torchrun's variables in the environment.
        console: console of the first process; None prints nothing.
        on_hang: ends this process if a rank hangs, because its main thread may be unable to. By default it prints a
            line on standard error.
        stderr_fd: file descriptor on which the user reads errors; 2 may point to a log.
        hooks: callbacks of the caller.

    Returns:
        The result, after the last step or after a signal (`exit_code`).

    Raises:
        UserError: if the configuration is invalid for this machine, data or checkpoint.
        RunError: if the loss stays non-finite, a disk is full, or a file is damaged; the message names the last good
            checkpoint.
    """
    start_time, hooks = time.perf_counter(), hooks or TrainingHooks()
    rollback: Rollback | None = None
    config, notes = resolve_data(config)
    while True:
        reporter = ConsoleReporter(console, config.training.train_iters)
        for note in notes if rank_info.rank == 0 else ():
            reporter.log(note)
        notes = ()
        try:
            outcome = _run_attempt(config, rank_info, reporter, start_time, on_hang, rollback, stderr_fd, hooks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(summary.describe_memory_error(config, rank_info.world_size, error)) from error
        if isinstance(outcome, TrainResult):
            return outcome
        rollback = outcome if isinstance(outcome, Rollback) else None
        moves_aside = rollback is not None and rollback.archives_newer
        config = config.replace(load=outcome.load, finetune=False, rollback=moves_aside)


def _run_attempt(
    config: Config,
    rank_info: RankInfo,
    console: ConsoleReporter,
    start_time: float,
    on_hang: HangHandler | None,
    rollback: Rollback | None,
    stderr_fd: int,
    hooks: TrainingHooks,
) -> TrainResult | Rollback | StageEnd:
    """Run one attempt: to the end of the run or stage, or to a rollback. Each attempt starts like a new process."""
    with dump_memory_if_exhausted(config, rank_info.rank):
        run = build_training_run(config, rank_info, console, rollback, hooks.previous_backend)
    try:
        hooks.on_built(run)
        trainer = Trainer(run, start_time, on_hang, rollback, stderr_fd, hooks)
        try:
            with dump_memory_if_exhausted(config, rank_info.rank):
                return trainer.train()
        finally:
            trainer.close()
    except RollbackRequested as request:
        request.__traceback__ = None  # its frames refer to the engine
        return request.rollback
    finally:
        run.close()
