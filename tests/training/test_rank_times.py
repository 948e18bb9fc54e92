"""Reports name the rank that others wait for, and its slow phase."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import Forked
from hanging_rank import SLOW
from tiny_runs import records, tiny_config, write_corpora

from megatron.distributed.launcher_environment import find_free_port
from megatron.training.console import describe_waits
from megatron.training.metrics_log import TrainRecord
from megatron.training.rank_times import ForwardTimer, RankTimes, compare_ranks

SCRIPT = Path(__file__).parents[1] / "support/hanging_rank.py"


def test_ranks_that_are_slow_are_named(tmp_path: Path) -> None:
    """Slow ranks are named: one in its forward pass, the other in its data loading, with two processes."""
    run = tmp_path / "run"
    config = tiny_config(
        write_corpora(tmp_path / "corpus"), run, train_iters=4, log_interval=2, num_gpus=2,
        train_micro_batch_size_per_gpu=2, checkpoint_factor=2,
    )  # fmt: skip
    config.save(tmp_path / "config.yml")
    environment = {"MASTER_PORT": str(find_free_port())}
    ranks = [
        Forked(
            SCRIPT, str(tmp_path / "config.yml"), str(rank), "2", "1", "slow", output=tmp_path / f"{rank}.txt",
            env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [child.wait(120) for child in ranks] == [0, 0]
    finally:
        for child in ranks:
            child.kill()
    first, second = (records(run)[step] for step in (2, 4))
    for record in (first, second):
        seconds = record["ms_per_step"] / 1e3
        assert record["slowest_rank"] == 1
        assert record["slowdown"] > 0.1
        assert record["data_wait_rank"] == 0
        assert SLOW / seconds <= record["data_wait"] * 1.001
        assert record["data_wait"] <= 1
        # The median of two is their mean: half of the slow rank's additional time, tripled by the backward pass.
        assert record["slowest_rank_wait"] > 0
    assert first["checkpoint_wait"] == 0
    assert 0 < second["checkpoint_wait"] < 1


def test_a_rank_is_compared_with_its_stage() -> None:
    """A rank is compared with the others of its stage, because stages differ in work; a stage of one rank has no
    comparison.
    """
    forward, stages = [0.1, 0.1, 0.13, 0.4, 0.41, 0.4], [0, 0, 0, 1, 1, 1]
    times = [RankTimes(seconds, data_wait=rank) for rank, seconds in enumerate(forward)]
    found = compare_ranks(times, stages, micro_batches=4)
    assert (found.slowest_rank, found.slowdown) == (2, pytest.approx(0.3))
    assert found.wait_per_step == pytest.approx(3 * 4 * 0.03)
    assert (found.data_wait_rank, found.data_wait) == (5, 5)
    alone = compare_ranks(times[:2], [0, 1], micro_batches=1)
    assert (alone.slowest_rank, alone.slowdown, alone.wait_per_step) == (None, None, 0.0)


def test_the_first_pass_of_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first pass of a step is timed, and none of a validation."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Model(torch.nn.Module):
        def forward(self, seconds: float) -> None:
            clock[0] += seconds

    model = Model()
    timer = ForwardTimer(model, torch.device("cpu"))
    for first in (1.0, 2.0):
        timer.begin_step()
        model.eval()
        model(8.0)
        model.train()
        model(first)
        model(16.0)
    timer.read()
    assert (timer.seconds, timer.count) == (3.0, 2)
    timer.close()
    timer.begin_step()
    model(1.0)
    assert timer.count == 2


def test_long_waits_are_reported() -> None:
    record = TrainRecord(
        step=1, loss=1.0, perplexity=2.7, learning_rate=1e-3, grad_norm=1.0, tokens_per_second=1.0, ms_per_step=1.0,
        tflops=1.0, mfu=None, loss_scale=1.0, skipped_steps=0, memory_gib=1.0, tokens=1, seconds_left=1.0,
        data_wait=0.04, data_wait_rank=3, checkpoint_wait=0.04, slowest_rank=7, slowdown=0.09, slowest_rank_wait=0.2,
    )  # fmt: skip
    assert describe_waits(record) == []
    assert describe_waits(replace(record, slowdown=0.3, slowest_rank_wait=0.04)) == []
    reported = replace(record, slowdown=0.3, data_wait=0.34, checkpoint_wait=0.12)
    assert describe_waits(reported) == ["data 34% (rank 3)", "checkpoint 12%", "rank 7 is 30% slower"]
    assert describe_waits(replace(record, data_wait=0.5, data_wait_rank=None)) == ["data 50%"]
