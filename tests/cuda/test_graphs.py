"""Micro-batches as CUDA graphs on the null device: they are captured and replayed, which saves kernel launches."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron.attention.reference import _get_distances
from megatron.config.execution import TRIAL_PHASE
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.position.numerics import collect_captured_tensors
from megatron.rehearsal.null_device.recorder import Counters, read_counters, read_stub_calls
from megatron.rehearsal.rank_process import PhaseMemory
from megatron.training import graph_trial
from megatron.training.graph_trial import GraphTrial
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train_resolved
from megatron.training.trainer import Trainer, TrainingHooks
from megatron.training.training_run import TrainingRun
from megatron.utils.errors import UserError
from tools.gpu.null_device_cases import OVERLAYS, Case, build_config


def count_graph_launches() -> int:
    return read_stub_calls().get("cudaGraphLaunch", 0)


def train(
    corpus: Path, run: Path, monkeypatch: pytest.MonkeyPatch, overlay: str = "kerple_log", **keys: Any
) -> tuple[str, list[tuple[int, Counters]], list[torch.Tensor]]:
    """Return the output of a training of four steps, each step's graph launches and other launches, and its tokens."""
    case = Case("graphs", overlay, {"attention_backend": "triton", "num_layers": 2, "train_iters": 4, **keys})
    config = resolve_run(build_config(case, corpus, run), LocalHardware.detect(), rank_info=RankInfo()).config
    steps: list[tuple[int, Counters]] = []
    read: list[torch.Tensor] = []
    real = Trainer.train_step

    def train_step(self: Trainer, *arguments: Any) -> bool:
        graphs, before = count_graph_launches(), read_counters()
        done = real(self, *arguments)
        steps.append((count_graph_launches() - graphs, read_counters() - before))
        return done

    def listen(run: TrainingRun) -> None:
        batches = run.batches

        def watch() -> Any:
            for batch in batches:
                read.append(batch["tokens"].clone())
                yield batch

        run.batches = watch()

    output = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        train_resolved(config, RankInfo(), Console(file=output, width=250), hooks=TrainingHooks(on_built=listen))
    return output.getvalue(), steps, read


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_replays_two_graphs_for_each_micro_batch(
    stage: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs save launches: DeepSpeed's launches and the sums of gradients remain. The run reads the same batches."""
    keys = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}
    _, eager, read = train(corpus, tmp_path / "a", monkeypatch, cuda_graph="off", **keys)
    output, graphs, read_by_graphs = train(corpus, tmp_path / "b", monkeypatch, cuda_graph="on", **keys)
    assert "CUDA graphs: on; " in output
    assert [count for count, _ in eager] == [0, 0, 0, 0]
    assert [count for count, _ in graphs][2:] == [4, 4]
    assert graphs[2][1].triton == 0 < eager[2][1].triton
    assert graphs[2][1].gemm == 0 < eager[2][1].gemm
    assert graphs[2][1].all_launches < 0.6 * eager[2][1].all_launches
    assert all(torch.equal(a, b) for a, b in zip(read, read_by_graphs, strict=True))


def test_validation_and_a_resumed_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation launches kernels, a resumed run has its own trial, and checkpoints are unchanged."""
    keys = {"checkpoint_factor": 2, "eval_interval": 3, "eval_iters": 1}
    output, steps, _ = train(corpus, tmp_path / "run", monkeypatch, **keys)
    assert output.count("CUDA graphs: on; ") == 1
    assert [count for count, _ in steps][2:] == [2, 2]
    output, steps, _ = train(corpus, tmp_path / "run", monkeypatch, **keys, load=str(tmp_path / "run"), train_iters=6)
    assert "Resuming" in output or "step_0000004" in output
    assert output.count("CUDA graphs: on; ") == 1
    assert len(steps) == 2


WAITS = {"fope"}
"""Methods whose passes copy from the host."""
NEVER = {"rotary_randomized": "randomized_positions: the host draws positions in every step"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_method_is_captured_or_gives_a_reason(
    overlay: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"gemma3": 6, **dict.fromkeys(("irope", "rnope_swa", "smollm3", "swan"), 4)}
    keys: dict[str, Any] = {"num_layers": layers[overlay]} if overlay in layers else {}
    output, _, _ = train(corpus, tmp_path, monkeypatch, overlay, attention_backend="auto", **keys)
    if overlay in NEVER:
        assert f"CUDA graphs: off; {NEVER[overlay]}" in output
    elif overlay in WAITS:
        assert f"CUDA graphs: off; megatron/position/encodings/{overlay}.py:" in output
        assert "waits for the device" in output
    else:
        assert "CUDA graphs: on; " in output


def test_uncapturable_models_are_rejected(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"cuda_graph on: .*fope.py:\d+ waits for the device, which no graph can"):
        train(corpus, tmp_path, monkeypatch, "fope", cuda_graph="on")


def test_cached_tensors_that_a_graph_reads_outlive_the_cache() -> None:
    """The cache holds the distances of eight lengths; whoever owns the graph holds those that it reads."""
    device = torch.device("cuda", 0)
    graph = torch.cuda.CUDAGraph()
    with collect_captured_tensors() as collected, torch.cuda.graph(graph):
        captured = _get_distances(100, device)
    for count in range(101, 120):
        _get_distances(count, device)
    assert _get_distances(100, device) is not captured
    assert any(tensor is captured for tensor in collected)


def test_a_rehearsal_excludes_the_self_check() -> None:
    memory = PhaseMemory()
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    memory.enter("data", 1)
    memory.enter(TRIAL_PHASE, 1)
    tried = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    del tried
    memory.enter("step", 1)
    memory.collect()
    assert TRIAL_PHASE not in memory.peaks
    assert memory.peaks["step"][0] < before + (1 << 28)


def test_a_capture_covers_launches_by_other_threads() -> None:
    """Another thread that launches into the stream, as autograd does, allocates from the graph's memory pool."""
    x = torch.ones(1 << 24, device="cuda", requires_grad=True)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    torch.cuda.empty_cache()

    def measure_outside() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != tuple(pool))

    with torch.cuda.graph(graph, pool=pool):
        before = measure_outside()
        (x * 2).square().sum().backward()
        assert x.grad is not None
        assert measure_outside() == before


def test_reports_of_memory_leave_out_the_trial(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expensive trial whose graphs are not used does not affect the peak memory of later steps."""
    train(corpus, tmp_path, monkeypatch, cuda_graph="off")
    peak = torch.cuda.max_memory_allocated()

    def waste(*arguments: Any, **options: Any) -> tuple[None, GraphTrial]:
        torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        return None, GraphTrial("too little memory to capture them")

    monkeypatch.setattr(graph_trial, "try_graphs", waste)
    output, _, _ = train(corpus, tmp_path, monkeypatch)
    assert "CUDA graphs: off; too little memory to capture them" in output
    assert torch.cuda.max_memory_allocated() < peak + (1 << 29)
