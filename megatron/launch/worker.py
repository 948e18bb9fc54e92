"""One process of a training run.

`run` is called directly where one process is enough. Otherwise `rank_group.py` starts `python -m megatron.launch.worker
JOB LOG RANK` for each rank, with the rendezvous in the environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT) and the resolved configuration in the job's folder. A failure is left there as a small JSON file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.launch.console import UnexpectedError, log_traceback, run_console
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError, HangError, RunError, UserError
from megatron.utils.output import GuardedStream
from megatron.utils.signals import end_with_parent

CONFIG_FILE = "config.yml"
ERROR_KINDS: dict[str, type[FarfieldError]] = {
    "user": UserError, "hang": HangError, "unexpected": UnexpectedError, "run": RunError,
}  # fmt: skip
"""What a rank's error may be, the more special first."""


def run_rank(config: Config, log: Path, rank: int, end: Callable[[HangError, bool], None] | None = None) -> int:
    """Train as one rank; every rank writes to the same log. Returns 0, or 128 + n if signal n ended the run early.

    Raises:
        FarfieldError: as the training raised it; anything else becomes an UnexpectedError that names the log.
    """
    errors = os.dup(2)  # what the user sees, which the log takes over

    def leave(error: HangError, tell: bool) -> None:
        if tell:
            os.write(errors, f"error: {error}\n".encode())
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    try:
        return _train(config, log, rank, end or leave, errors)
    finally:
        os.close(errors)


def _train(config: Config, log: Path, rank: int, end: Callable[[HangError, bool], None], errors: int) -> int:
    with run_console(log, silent=rank > 0) as console, log_traceback(log):
        output = GuardedStream(console.file)
        console.file = output  # type: ignore[assignment]
        # These import torch, deepspeed and megatron-core, whose noise is logged.
        from megatron.distributed.process_groups import abandon_groups
        from megatron.training.trainer import train

        try:
            result = train(config, console if rank == 0 else None, end, errors=errors)
        except BaseException:
            abandon_groups()
            raise
        if output.problem is not None:
            saved_descriptor = "nothing is saved" if result.checkpoint is None else f"{result.checkpoint} is saved"
            raise RunError(f"standard output: {output.problem}; ended at step {result.step}, {saved_descriptor}")
        return result.exit_code


def get_error_path(job: Path, rank: int) -> Path:
    """Where a rank leaves its error for the launcher."""
    return job / f"error_{rank}.json"


def serialize_error(error: FarfieldError) -> dict[str, Any]:
    """An error for the launcher, as JSON has it."""
    kind = next(name for name, own in ERROR_KINDS.items() if isinstance(error, own))
    return {"kind": kind, "message": str(error), "key": getattr(error, "key", None), "time": time.time()}


def main(arguments: list[str]) -> int:
    """`JOB LOG RANK`: the body of a started process."""
    end_with_parent()
    job, log, rank = Path(arguments[0]), Path(arguments[1]), int(arguments[2])

    def leave(error: HangError, tell: bool) -> None:
        write_text_atomically(get_error_path(job, rank), json.dumps(serialize_error(error)))
        os._exit(error.exit_code)

    try:
        return run_rank(read_config(job / CONFIG_FILE), log, rank, leave)
    except FarfieldError as error:
        write_text_atomically(get_error_path(job, rank), json.dumps(serialize_error(error)))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
