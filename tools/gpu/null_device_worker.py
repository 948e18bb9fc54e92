#!/usr/bin/env python3
"""Train cases on the null device, one after another in this process: the worker of `null_device_matrix.py`.

    null_device_worker.py JOB RESULTS

JOB is a JSON file {"corpus": …, "cases": [{"name": …, "overlay": …, "keys": {…}}, …], "after": …}. RESULTS gets a line
of JSON for each finished case, so that the case of a dying process is known. If `after` names the results of another
rank, each case waits for that rank's, which builds the sample index. `runs` is the parent of the cases' own folders if
several ranks write checkpoints together. With several ranks, torchrun's variables select the rank. Process groups are
destroyed between cases, because their meshes differ.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.gpu.null_device_cases import Case, run_case


def main() -> None:
    job, results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    world_size, port = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("MASTER_PORT", "0"))
    with tempfile.TemporaryDirectory() as folder, results.open("a", encoding="utf-8", buffering=1) as file:
        for number, case in enumerate(job["cases"]):
            if job.get("after"):
                wait_for_lines(Path(job["after"]), number + 1)
            if world_size > 1:
                leave_groups()
                os.environ["MASTER_PORT"] = str(port + number)
            run = Path(job.get("runs", folder)) / case["name"]
            outcome = run_case(Case(**case), Path(job["corpus"]), run, world_size)
            file.write(json.dumps(asdict(outcome)) + "\n")


def wait_for_lines(path: Path, count: int) -> None:
    """Wait until a file has `count` lines, for at most five minutes."""
    end = time.monotonic() + 300
    while time.monotonic() < end and not (path.is_file() and path.read_text(encoding="utf-8").count("\n") >= count):
        time.sleep(0.1)


def leave_groups() -> None:
    """Destroy all process groups, because the next case may use another mesh."""
    import torch.distributed as dist

    from megatron.distributed.process_groups import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
