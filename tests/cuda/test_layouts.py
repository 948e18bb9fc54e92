"""Layouts of many ranks on a CUDA device: one process as the first or the last of eight, and two real ones.

A worker process trains all cases of a rank, so that imports and compiled kernels are shared.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.rehearsal.null_device.environment import build_environment, get_gpu_model
from tools.gpu.null_device_cases import (
    STAGED_LAYOUTS,
    Case,
    Outcome,
    find_faults,
    list_layout_cases,
    list_sharded_zero_cases,
)

WORKER = Path(__file__).parents[2] / "tools/gpu/null_device_worker.py"
RANKS = 8
FIRST_PORTS = range(20_000, 30_000, 100)
"""First ports of a pair, one port a case. Connections of other processes never get ports below Linux's 32768."""
MAX_SECONDS = 1200
"""Longest time in which no rank finishes a case, in seconds."""
LONE = [
    *list_layout_cases(["kerple_log"]),
    *list_layout_cases(["cdape_kerple_log"], ["tensor_2", "context_4", "pipeline_2", "tensor_2_context_2_pipeline_2"]),
    *list_layout_cases(["rotary", "fire"], ["tensor_2_context_2", "pipeline_4"]),
    *[case for case in list_sharded_zero_cases() if case.name.startswith("kerple_log") and "bf16" in case.name],
]
PAIR = list_layout_cases(["kerple_log"], ["data", "tensor_2", "context_2", "pipeline_2", *STAGED_LAYOUTS])


def start_worker(
    cases: list[Case], corpus: Path, folder: Path, rank: int, ranks: int, port: int, after: Path | None = None
) -> subprocess.Popen:
    """Run a process as one rank. Its results are in folder/RANK.jsonl, and its output in folder/RANK.txt.

    Args:
        after: results of a rank whose cases come first, so that only one rank of a job runs at a time. Without it, all
            ranks run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / f"job_{rank}.json"
    described = {"corpus": str(corpus), "cases": [asdict(case) for case in cases], "after": after and str(after)}
    if ranks != RANKS:
        described["runs"] = str(folder / "runs")  # the ranks make their checkpoints together
    job.write_text(json.dumps(described), encoding="utf-8")
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    base = {**os.environ, **{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1"}
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):  # this process's own null device, of other properties
        base.pop(name, None)
    environment = build_environment(get_gpu_model("h100"), devices=ranks, is_single_rank=ranks == RANKS, base=base)
    with (folder / f"{rank}.txt").open("w") as output:
        command = [sys.executable, str(WORKER), str(job), str(folder / f"{rank}.jsonl")]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def wait_for_workers(workers: dict[int, subprocess.Popen], folder: Path) -> None:
    """Wait until all ranks have ended. Kill them if no rank finishes a case in `MAX_SECONDS`, or on an interrupt."""
    written, since = 0, time.monotonic()
    try:
        while any(worker.poll() is None for worker in workers.values()):
            size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            if size > written:
                written, since = size, time.monotonic()
            if time.monotonic() - since > MAX_SECONDS:
                raise TimeoutError(f"no rank finished a case in {MAX_SECONDS} seconds; see {folder}")
            time.sleep(0.1)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def read_outcomes(folder: Path, rank: int) -> dict[str, Outcome]:
    lines = (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {outcome.name: outcome for outcome in outcomes}


@pytest.fixture(scope="module")
def lone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Outcome]]:
    """Return the records of the first and last of eight ranks, each run without the others."""
    folder, workers = tmp_path_factory.mktemp("lone"), {}
    for rank in (0, RANKS - 1):
        after = folder / "0.jsonl" if rank else None
        workers[rank] = start_worker(LONE, corpus, folder, rank, RANKS, 29500, after)
    wait_for_workers(workers, folder)
    return {rank: read_outcomes(folder, rank) for rank in workers}


@pytest.mark.parametrize("rank", [0, RANKS - 1])
@pytest.mark.parametrize("case", LONE, ids=lambda case: case.name)
def test_a_rank_of_eight_trains(case: Case, rank: int, lone: dict[int, dict[str, Outcome]]) -> None:
    assert case.name in lone[rank], "its process died"
    outcome = lone[rank][case.name]
    assert find_faults(case, outcome) == [], outcome.trace


@pytest.fixture(scope="module")
def pair(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """Return the records of two processes. gloo is real between them; NCCL exchanges nothing."""
    folder, port = tmp_path_factory.mktemp("pair"), FIRST_PORTS[os.getpid() % len(FIRST_PORTS)]
    wait_for_workers({rank: start_worker(PAIR, corpus, folder, rank, 2, port) for rank in range(2)}, folder)
    printed = "".join((folder / f"{rank}.txt").read_text() for rank in range(2))
    assert "destroy_process_group" not in printed
    return [read_outcomes(folder, rank) for rank in range(2)]


@pytest.mark.parametrize("case", PAIR, ids=lambda case: case.name)
def test_two_processes_train(case: Case, pair: list[dict[str, Outcome]]) -> None:
    for outcomes in pair:
        assert case.name in outcomes, "its process died"
        assert find_faults(case, outcomes[case.name]) == [], outcomes[case.name].trace
