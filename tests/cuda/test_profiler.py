"""Snapshots of a GPU's memory: after a given step, and when memory is exhausted."""

import gc
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.distributed.launcher_environment import RankInfo
from megatron.training.profiler import PROFILE
from megatron.training.train import train_resolved
from megatron.training.trainer import TrainingHooks
from megatron.training.training_run import TrainingRun
from megatron.utils.errors import RunError
from tools.gpu.null_device_cases import Case, build_config


@pytest.fixture
def dumped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Allocated bytes at each snapshot, as counted by the allocator."""
    counts: list[int] = []
    real = torch.cuda.memory._dump_snapshot

    def dump(path: str) -> None:
        counts.append(torch.cuda.memory_allocated())
        real(path)

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return counts


def train_case(corpus: Path, run: Path, hooks: TrainingHooks | None = None, batch_size: int = 4, **keys: Any) -> None:
    sizes = {"train_micro_batch_size_per_gpu": batch_size, "train_batch_size": batch_size}
    config = build_config(Case("profiled", "kerple_log", keys | sizes), corpus, run).replace(save=str(run))
    train_resolved(config, RankInfo(), hooks=hooks)


def read_snapshot(path: Path) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the bytes of all used blocks, these blocks, and the history of allocations."""
    snapshot = pickle.loads(path.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    used = [block for block in blocks if block["state"].startswith("active")]
    history = [event for device in snapshot["device_traces"] for event in device]
    return sum(block["size"] for block in used), used, history


def list_lines(blocks: list[dict[str, Any]]) -> set[str]:
    return {frame["filename"] for block in blocks for frame in block.get("frames", [])}


def test_the_memory_after_a_step(corpus: Path, tmp_path: Path, dumped: list[int]) -> None:
    train_case(corpus, tmp_path / "run", memory_snapshot=2, train_iters=3)
    used, blocks, history = read_snapshot(tmp_path / "run" / PROFILE / "memory_step_2" / "rank_0.pickle")
    assert [used] == dumped
    assert any(name.endswith("megatron/training/engine.py") for name in list_lines(blocks))
    assert any(event["action"] == "alloc" for event in history)
    torch.cuda.empty_cache()
    kept = torch.empty(4096, device="cuda")
    after = torch.cuda.memory._snapshot()  # nothing is recorded any more
    assert kept.data_ptr() not in {event.get("addr") for device in after["device_traces"] for event in device}


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_does_not_suffice(corpus: Path, tmp_path: Path, dumped: list[int], recorded: bool) -> None:
    """A snapshot contains the tensors in memory, and the Python lines that allocated them if recorded.

    Earlier tests may leave free blocks of some 20 MiB in the allocator's segments, so the batch needs larger tensors.
    """
    weights: list[int] = []
    total = torch.cuda.get_device_properties(0).total_memory

    def leave_little(run: TrainingRun) -> None:
        weights.append(sum(p.numel() * p.element_size() for p in run.engine.model.parameters()))
        gc.collect()  # not in the middle of the step: engines are in cycles
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**21) / total)

    keys = {"memory_snapshot": 2} if recorded else {}
    try:
        with pytest.raises(RunError, match="memory snapshot of rank 0: ") as raised:
            train_case(corpus, tmp_path / "run", TrainingHooks(on_built=leave_little), batch_size=512, **keys)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    path = tmp_path / "run" / PROFILE / "out_of_memory" / "rank_0.pickle"
    assert re.search(rf"{path}\b.*train_micro_batch_size_per_gpu", str(raised.value))
    used, blocks, history = read_snapshot(path)
    assert [used] == dumped
    assert used > 2 * weights[0]
    assert any(event["action"] == "oom" for event in history) == recorded
    if recorded:  # blocks that tests before left may have lines in any case
        assert any(name.endswith("megatron/training/engine.py") for name in list_lines(blocks))
