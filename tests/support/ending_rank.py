"""Run by tests: train as the one rank of a run that ends in a given way, and tell how its process groups end.

Arguments: the job's folder; the way; the backend that torch says it has. found.json in the folder gets the exit code,
whether the groups were there before and after, and how often they were aborted.
"""

import atexit
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from megatron.distributed.launcher_environment import RankInfo
from megatron.launch import worker
from megatron.training import trainer
from megatron.utils.errors import RunError, UserError

WAYS = {"user": UserError, "run": RunError, "unexpected": ZeroDivisionError, "interrupt": KeyboardInterrupt}


def main(job: Path, way: str, backend: str) -> None:
    """Train to the end, or until a step does what the way says; then do what the interpreter does when it ends."""
    take_step = trainer.Trainer.train_step

    def step(self: trainer.Trainer, stop: object) -> bool:
        if way in WAYS:
            raise WAYS[way]("said by the test")
        if way == "signal":
            signal.raise_signal(signal.SIGTERM)
        return take_step(self, stop)

    trainer.Trainer.train_step = step
    os.environ.update(RankInfo().to_environment("127.0.0.1", 0))
    code = None
    with suppress(KeyboardInterrupt):
        code = worker.main([str(job), str(job / "log.txt"), "0"])
    met, aborted = dist.is_initialized(), []
    if backend == "nccl":  # of which there is none here: what would be called
        dist.get_backend = lambda: "nccl"
        dist.distributed_c10d._abort_process_group = lambda: aborted.append(True)
    atexit._run_exitfuncs()
    (job / "found.json").write_text(json.dumps([code, met, dist.is_initialized(), len(aborted)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
