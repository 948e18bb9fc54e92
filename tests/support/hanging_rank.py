"""One rank of a run in which one hangs: `hanging_rank.py CONFIG RANK WORLD LATE HOW`; rank LATE does at step 2 what HOW
says, while it reads its data: sleep, stop (SIGSTOP), spin (in C, with Python's lock held), die (SIGKILL). Or nothing
hangs, but all take longer: slow (rank LATE computes, the others wait for their data, `SLOW` seconds more in a step)."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


SLOW = 0.3


def waiting(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(SLOW)
        yield batch


def hanging(batches: Iterator[Any], how: str) -> Iterator[Any]:
    for step, batch in enumerate(batches):
        if step == 2:
            {"sleep": sleeping, "stop": stopped, "spin": spinning, "die": killed}[how]()
        yield batch


def sleeping() -> None:
    time.sleep(600)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def spinning() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    config, rank, world, late, how = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1")

    from megatron.config.load import read_config
    from megatron.training import trainer

    prepare = trainer.build_training_run

    def prepared(*given: Any) -> Any:
        run = prepare(*given)
        if how == "slow" and rank == late:
            run.engine.model.decoder.final_layernorm.register_forward_pre_hook(lambda *inputs: time.sleep(SLOW))
        elif how == "slow":
            run.batches = waiting(run.batches)
        elif rank == late:
            run.batches = hanging(run.batches, how)
        return run

    trainer.build_training_run = prepared
    trainer.train(read_config(Path(config)))


if __name__ == "__main__":
    main()
