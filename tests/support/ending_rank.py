"""Train as the single rank of a run that ends in a given way, and report the end of its process groups.

Arguments: the job's folder, the way it ends, and the backend that torch should report. found.json in the folder gets
the exit code, whether the groups existed before and after, and how often they were aborted.
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
    """Train to the end, or until a step ends the run in the given way, and then do what the interpreter does at
    exit.
    """
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
    if backend == "nccl":  # not available here; record the call
        dist.get_backend = lambda: "nccl"
        dist.distributed_c10d._abort_process_group = lambda: aborted.append(True)
    atexit._run_exitfuncs()
    (job / "found.json").write_text(json.dumps([code, met, dist.is_initialized(), len(aborted)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
