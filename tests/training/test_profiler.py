"""Profiles of single steps: file formats, contents, and no effect on the run."""

import gzip
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import losses, same_weights, tiny_config
from torch.autograd import DeviceType

from megatron.config.schema import Config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.training.profiler import PROFILE, format_kernels
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train, train_resolved
from megatron.training.trainer import TrainingHooks
from megatron.utils.errors import UserError

CPU = LocalHardware(num_gpus=0, num_cores=2)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, as Perfetto and TensorBoard read it."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def count_steps(events: list[dict[str, Any]]) -> list[str]:
    return sorted(event["name"] for event in events if event["name"].startswith("ProfilerStep"))


def test_the_profile_of_some_steps(corpus: Path, tmp_path: Path) -> None:
    plain, run = tmp_path / "plain", tmp_path / "run"
    train(tiny_config(corpus, plain, train_iters=5))
    profile = {"from": 3, "to": 4}
    taken = run / PROFILE / "steps_3-4" / "rank_0.pt.trace.json.gz"
    taken.parent.mkdir(parents=True)
    taken.write_text("somebody's own")
    train(tiny_config(corpus, run, train_iters=5, profile=profile))
    assert losses(run) == losses(plain)
    assert same_weights(run, plain)

    assert taken.read_text() == "somebody's own"
    events = read_trace(taken.with_name("rank_0.2.pt.trace.json.gz"))
    assert count_steps(events) == ["ProfilerStep#3", "ProfilerStep#4"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert {name: names.count(name) for name in ("data", "reduce", "forward and backward", "step")} == {
        "data": 2, "reduce": 2, "forward and backward": 2, "step": 2
    }  # fmt: skip

    # The table agrees with the trace for each operator: exact calls, and times within the table's digits.
    head, _, columns, *rows = (taken.parent / "rank_0.kernels.txt").read_text().splitlines()
    assert head.startswith("steps 3 to 4, ")
    assert columns.split()[-1] == "operator"
    calls = {row.split("  ")[-1]: float(row.split()[2]) for row in rows if "others" not in row}
    for name in ("aten::mm", "aten::addmm", "aten::_foreach_copy_"):
        traced = sum(event["name"] == name and event.get("cat") == "cpu_op" for event in events)
        assert calls.get(name, 0) == traced / 2
    assert calls["aten::mm"] > 0
    shares = [float(row.split()[1].rstrip("%")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    assert shares[:-1] == sorted(shares[:-1], reverse=True)


def test_a_run_stopped_during_its_profile_and_its_continuation(corpus: Path, tmp_path: Path) -> None:
    """A run stopped during its profile and its continuation each write their steps; the very first step cannot warm
    up.
    """
    config = tiny_config(
        corpus, tmp_path / "run", train_iters=6, profile={"from": 1, "to": 5}, load=str(tmp_path / "run")
    )

    def stop_at_2(phase: str, step: int) -> None:
        if (phase, step) == ("forward and backward", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    resolved = resolve_run(config, CPU).config
    assert train_resolved(resolved, RankInfo(), hooks=TrainingHooks(on_phase=stop_at_2)).step == 2
    folder = tmp_path / "run" / PROFILE
    assert count_steps(read_trace(folder / "steps_1-2" / "rank_0.pt.trace.json.gz"))[:2] == [
        "ProfilerStep#1",
        "ProfilerStep#2",
    ]
    assert (folder / "steps_1-2" / "rank_0.kernels.txt").read_text().startswith("steps 1 to 2, ")
    assert train(config).step == 6
    steps = [f"ProfilerStep#{step}" for step in (3, 4, 5)]
    assert count_steps(read_trace(folder / "steps_3-5" / "rank_0.pt.trace.json.gz")) == steps


@pytest.mark.parametrize(
    ("keys", "save", "why"),
    [
        ({"profile": {"from": 1, "to": 2}}, False, "profile needs save"),
        (
            {"profile": {"from": 1, "to": 2, "ranks": [0, 1]}},
            True,
            r"profile.ranks are \[0, 1\], but the run has 1 rank,",
        ),
        ({"memory_snapshot": 2}, True, "memory_snapshot is 2, but this run uses the CPU"),
    ],
)
def test_invalid_profiles_are_rejected(keys: dict[str, Any], save: bool, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        resolve_run(tiny_config(tmp_path, tmp_path if save else None, **keys), CPU)


def test_profiles_beyond_the_last_step_are_reported(tmp_path: Path) -> None:
    config: Config = tiny_config(tmp_path, tmp_path, profile={"from": 5, "to": 6})
    (note,) = [note for note in resolve_run(config, CPU).notes if "profile" in note]
    assert note == "profile.from 5: after train_iters 4, so nothing is profiled"


def test_the_table_of_a_gpu_has_its_kernels() -> None:
    """The table of a GPU lists kernels by name, without operators and phases, or states that none were traced."""

    def average(key: str, microseconds: float, count: int, **others: Any) -> SimpleNamespace:
        defaults = {"device_type": DeviceType.CUDA, "is_user_annotation": False, "self_cpu_time_total": 0.0}
        return SimpleNamespace(key=key, self_device_time_total=microseconds, count=count, **{**defaults, **others})

    operator = average("aten::mm", 900.0, 6, device_type=DeviceType.CPU, self_cpu_time_total=50.0)
    averages = [
        average("gemm", 600.0, 4),
        average("attend", 1400.0, 2),
        average("step", 9e9, 2, is_user_annotation=True),
    ]
    table = format_kernels([operator, *averages], range(5, 7), 0.01, on_device=True)
    assert table.splitlines() == [
        "steps 5 to 6, 5.0 ms per step under the profiler, 1.0 ms of it in kernels",
        "",
        " ms per step  share calls per step  µs per call  kernel",
        "       0.700  70.0%            1.0        700.0  attend",
        "       0.300  30.0%            2.0        150.0  gemm",
    ]
    untraced = format_kernels([operator], range(5, 7), 0.01, on_device=True).splitlines()
    assert untraced[0].endswith(
        "0.0 ms of it in operators; kernels could not be traced (CUPTI), so these are host operators"
    )
    assert untraced[-1].split() == ["0.025", "100.0%", "3.0", "8.3", "aten::mm"]
