"""Process of a training run.

`run_rank` is called directly if one process is sufficient. Otherwise, `rank_group.py` starts `python -m
megatron.launch.worker JOB LOG RANK` for each rank, with torchrun's variables in the environment and the resolved
configuration in the job's folder. Failures are written there as a small JSON file (`ErrorReport`).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.load import read_config
from megatron.config.schema import CONFIG_FILE, Config
from megatron.distributed.launcher_environment import RankInfo
from megatron.launch.rank_group import ErrorReport, get_error_path
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.console import GuardedStream, log_traceback, run_console
from megatron.utils.errors import FarfieldError, HangError, RunError
from megatron.utils.imports import pause_garbage_collection
from megatron.utils.progress import IMPORTING, WaitAnnouncer
from megatron.utils.signals import exit_with_parent

if TYPE_CHECKING:
    from megatron.training.trainer import TrainingHooks


def run_rank(
    config: Config,
    log: Path,
    rank_info: RankInfo,
    on_hang: Callable[[HangError, bool], None] | None = None,
    hooks: TrainingHooks | None = None,
) -> int:
    """Train as one rank; all ranks write to the same log.

    Args:
        config: resolved configuration.
        log: file for output that is not shown to the user.
        rank_info: this rank.
        on_hang: exits this process when a rank hangs; its second argument is True if this rank should report the error.
        hooks: hooks of a Python caller.

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        FarfieldError: error of the training; other exceptions become an UnexpectedError that names the log.
    """
    user_errors = os.dup(2)  # the user's stderr, before it is redirected to the log

    def exit_process(error: HangError, is_reporter: bool) -> None:
        if is_reporter:
            os.write(user_errors, f"error: {error}\n".encode())
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    try:
        return _train(config, log, rank_info, on_hang or exit_process, user_errors, hooks)
    finally:
        os.close(user_errors)


def _train(
    config: Config,
    log: Path,
    rank_info: RankInfo,
    on_hang: Callable[[HangError, bool], None],
    user_errors: int,
    hooks: TrainingHooks | None,
) -> int:
    with run_console(log, silent=rank_info.rank > 0) as console, log_traceback(log):
        output = GuardedStream(console.file)
        console.file = output  # type: ignore[assignment]
        announce = console.print if rank_info.rank == 0 else lambda line: None
        # These import torch, deepspeed and megatron-core, whose output goes to the log.
        with pause_garbage_collection(), WaitAnnouncer(announce, IMPORTING):
            from megatron.distributed.process_groups import abort_groups
            from megatron.training.train import train_resolved
        _freeze_imports()

        try:
            shown = console if rank_info.rank == 0 else None
            result = train_resolved(config, rank_info, shown, on_hang, stderr_fd=user_errors, hooks=hooks)
        except BaseException:
            abort_groups()
            raise
        if output.problem is not None:
            saved = "no checkpoint was saved" if result.checkpoint is None else f"saved {result.checkpoint}"
            raise RunError(f"standard output: {output.problem}; stopped at step {result.step}, {saved}")
        return result.exit_code


@cache
def _freeze_imports() -> None:
    """Exclude imported objects from garbage collection.

    DeepSpeed runs it for every engine, which would take a third of a second.

    Called once per process: a second training must be able to collect the objects of the first. Triton 3.9 is built
    with nanobind, which prints objects that are not collected when the process ends, so they are unfrozen before.
    """
    gc.freeze()
    if (triton := sys.modules.get("triton._C.libtriton")) and type(triton.ir.builder).__module__ == "nanobind":
        atexit.register(gc.unfreeze)


def main(arguments: list[str]) -> int:
    """Entry point of a started process, with the arguments `JOB LOG RANK`."""
    exit_with_parent()
    job, log, rank_info = Path(arguments[0]), Path(arguments[1]), RankInfo.from_environment()

    def exit_process(error: HangError, is_reporter: bool) -> None:
        _write_report(job, rank_info, error)
        os._exit(error.exit_code)

    try:
        return run_rank(read_config(job / CONFIG_FILE), log, rank_info, exit_process)
    except FarfieldError as error:
        _write_report(job, rank_info, error)
        return error.exit_code


def _write_report(job: Path, rank_info: RankInfo, error: FarfieldError) -> None:
    write_text_atomically(get_error_path(job, rank_info.rank), ErrorReport.from_error(error).to_json())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
