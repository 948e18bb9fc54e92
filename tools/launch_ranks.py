"""Processes that run a tool's script together: each runs `SCRIPT FOLDER RANK WORLD` and writes FOLDER/RANK.json."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from megatron.distributed.launcher_environment import RankInfo


def run_ranks(script: Path, folder: Path, world_size: int, job: Any) -> list[Any]:
    """Start the script once per rank, with the job as FOLDER/job.json.

    Returns:
        Results of the ranks, in order.

    Raises:
        SystemExit: if a rank fails, with the end of its output.
    """
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = []
    try:
        for rank in range(world_size):
            with open(folder / f"{rank}.txt", "w") as output:
                command = [sys.executable, "-W", "ignore", str(script), str(folder), str(rank), str(world_size)]
                children.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        failed = [rank for rank, child in enumerate(children) if child.wait() != 0]
    finally:
        for child in children:
            child.kill()
    if failed:
        printed = (folder / f"{failed[0]}.txt").read_text(encoding="utf-8")
        raise SystemExit(f"error: rank {failed[0]} of {world_size} failed: {printed[-2000:]}")
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world_size)]


def run_rank(work: Callable[[Any, Callable[[], RankInfo]], Any]) -> None:
    """Run one rank's script: write the result of `work(job, connect)`.

    `connect()` joins the other ranks. Each call starts over, so that the next mesh differs from the last, and destroys
    the existing process groups, because each group keeps threads.
    """
    import torch

    from megatron.distributed.process_groups import parallel_state

    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    meetings = count()

    def connect() -> RankInfo:
        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        store = torch.distributed.FileStore(str(folder / f"store_{next(meetings)}"), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return RankInfo(rank, world)

    found = work(json.loads((folder / "job.json").read_text(encoding="utf-8")), connect)
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
