"""Training passes as graphs: a replay gives the same results as eager launches."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_graphs import Rerun
from master_weights import masters
from models import build_model
from tiny_runs import VOCABULARY, tiny_config
from torch import nn

from megatron.config.schema import Config
from megatron.config.validation import validate_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import ProcessGroups, init_distributed
from megatron.model.graphed_model import GraphedModel, TrainingPasses
from megatron.position.encodings.rotary import Rotary
from megatron.training import graph_trial
from megatron.training.engine import Engine
from megatron.training.graph_trial import GraphTrial, build_graphs, choose_graphs, plan_graph_trial, try_graphs
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import RunError, UserError

GIB = 2**30
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
TOKENS = torch.randint(0, VOCABULARY, (6, 2, 17), generator=torch.Generator().manual_seed(5))
MASKS = (torch.rand(6, 2, 16, generator=torch.Generator().manual_seed(6)) < 0.7).float()


def config(stage: int, precision: str, **keys: Any) -> Config:
    """Two sequences of 16 tokens per micro-batch, with a score processor."""
    keys = {"zero_optimization": {"stage": stage}, "precision": precision, "score_processor": "dape", **keys}
    return tiny_config(Path(), train_micro_batch_size_per_gpu=2, **keys)


def gpt() -> nn.Module:
    """Small model in training mode."""
    chosen = config(0, "fp32")
    return build_model(chosen.model, chosen.position, VOCABULARY, seed=1).train()


def batch(index: int) -> dict[str, torch.Tensor]:
    rows = TOKENS[index % len(TOKENS)]
    mask = MASKS[index % len(MASKS)]
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), "loss_mask": mask}


def run(engine: Engine, first: int, steps: int, accumulate: int) -> list[float]:
    """Return the losses of some steps; each step uses the next micro-batches."""
    losses = []
    for step in range(first, first + steps):
        batches = [batch(step * accumulate + i) for i in range(accumulate)]
        counted = int(sum(each["loss_mask"].sum() for each in batches))
        losses.append(float(engine.forward_backward(batches, counted)))
        engine.step(1e-2)
    return losses


def capture(model: nn.Module, *, with_log_z: bool = False) -> tuple[GraphedModel, Rerun]:
    """Build graphs of micro-batches like those of `test_engine.batch`, captured with other tokens."""
    rerun = Rerun()
    rows = TOKENS[0, :, :-1].flip(1)
    return GraphedModel(TrainingPasses(model, with_log_z=with_log_z), rows, rows.flip(0), rerun), rerun


def train(graphs: bool, accumulate: int, **keys: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Return losses and masters of four steps, and the number of replays."""
    chosen = config(**keys, gradient_accumulation_steps=accumulate, train_batch_size=2 * accumulate)
    groups = init_distributed(RankInfo(), ParallelSizes(), device="cpu", backend="gloo")
    engine = Engine(chosen, build_model(chosen.model, chosen.position, VOCABULARY, seed=1), groups)
    engine.model.train()
    losses = run(engine, 0, 1, accumulate)
    graphed, rerun = capture(engine.model, with_log_z=chosen.training.z_loss > 0)
    if graphs:
        engine.use_graphs(graphed)
    losses += run(engine, 1, 3, accumulate)
    found = {name: value.clone() for name, value in masters(engine.deepspeed).items()}
    engine.close()
    assert "forward" not in vars(engine.model)
    return losses, found, rerun.replays


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_the_same_bit_for_bit(stage: int, precision: str, accumulate: int) -> None:
    keys = {"stage": stage, "precision": precision, "gradient_clipping": 0.5}
    eager, graphs = (train(which, accumulate, **keys) for which in (False, True))
    assert (eager[2], graphs[2]) == (0, 3 * accumulate * 2)
    assert graphs[0] == eager[0]
    assert all(torch.equal(value, eager[1][name]) for name, value in graphs[1].items())


@pytest.mark.parametrize(
    "keys",
    [{"z_loss": 1e-2}, {"checkpoint_activations": True}, {"checkpoint_activations": "selective"}, {"pos_emb": "fire"}],
    ids=str,
)
def test_graphs_train_alike_with_other_keys(keys: dict[str, Any]) -> None:
    eager, graphs = (train(which, 2, stage=1, precision="fp32", **keys) for which in (False, True))
    assert graphs[2] > 0
    assert graphs[0] == eager[0]
    assert all(torch.equal(value, eager[1][name]) for name, value in graphs[1].items())


def test_a_gradient_is_not_copied_and_survives_the_next_replay() -> None:
    model = gpt()
    graphed, _ = capture(model)
    graphed.install()
    parameter = graphed.used[0]
    rows = TOKENS[1, :, :-1]
    model(rows, labels=rows).sum().backward()
    assert parameter.grad is not None
    static = parameter.grad.data_ptr()
    assert static == graphed._gradients[0].data_ptr()
    first = parameter.grad.clone()
    model(rows, labels=rows)
    assert parameter.grad.data_ptr() != static
    assert torch.equal(parameter.grad, first)


def test_other_calls_stay_as_they_are() -> None:
    """Validation, other shapes and documents do not use a graph."""
    model = gpt().eval()
    rows = TOKENS[0, :, :-1]
    expected = model(rows, labels=rows)
    graphed, rerun = capture(model)
    graphed.install()
    assert torch.equal(model(rows, labels=rows), expected)  # not training
    model.train()
    with torch.no_grad():
        model(rows, labels=rows)
    model(rows[:1], labels=rows[:1])
    model(rows)
    model(rows, labels=rows, with_log_z=True)
    model(rows, labels=rows, document_starts=torch.zeros_like(rows))
    assert rerun.replays == 0
    model(rows, labels=rows, position_seed=3)
    assert rerun.replays == 1


def test_a_parameter_that_moved_is_an_error() -> None:
    model = gpt()
    graphed, _ = capture(model)
    graphed.install()
    graphed.used[0].data = graphed.used[0].data.clone()
    rows = TOKENS[0, :, :-1]
    with pytest.raises(RuntimeError, match="has moved"):
        model(rows, labels=rows)


class Wrong(Rerun):
    """Graphs that repeat the captured micro-batch."""

    def capture(self, function: Any) -> Any:
        _, outputs = super().capture(function)
        return (lambda: None), outputs


def attempt(model: nn.Module, capture: type[Rerun] = Rerun) -> tuple[GraphedModel | None, GraphTrial]:
    sample = batch(0)
    return try_graphs(model, sample["tokens"], sample["labels"], sample["loss_mask"], build_capture=capture)


def test_a_trial_leaves_no_trace() -> None:
    """A trial changes no gradient, random number or forward hook of the model, and the graphs are correct."""
    model = gpt()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    graphed, trial = attempt(model)
    assert graphed is not None
    assert (trial.refusal, trial.is_exact) == (None, True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert calls == []


def test_a_trial_detects_errors() -> None:
    model = gpt()
    graphed, trial = attempt(model, Wrong)
    assert graphed is None
    assert trial.refusal is not None
    assert "differs from the eager result" in trial.refusal
    model.get_submodule("decoder").register_forward_hook(lambda *_: None)
    assert attempt(model)[1].refusal == "a hook on decoder must see every pass"


class Failing(Rerun):
    """The device rejects an operation, and then the end of the capture."""

    error: Exception = RuntimeError("operation not permitted when stream is capturing")

    def capture(self, function: Any) -> Any:
        try:
            raise self.error
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904


class Small(Failing):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_a_failed_capture_is_reported_with_its_cause() -> None:
    trial = attempt(gpt(), Failing)[1]
    assert trial.refusal == "capture failed: RuntimeError: operation not permitted when stream is capturing"
    assert attempt(gpt(), Small)[1].refusal == "too little memory to capture them"


class Lost(Failing):
    """An operation accesses an illegal address."""

    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def is_device_usable(self) -> bool:
        return False


def test_a_lost_device_ends_the_run_on_all_ranks_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def fork_rng(devices: list[Any]) -> Iterator[None]:
        yield
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not attempt(gpt(), Failing)[1].is_device_lost
    trial = attempt(gpt(), Lost)[1]
    assert trial.is_device_lost
    message = "CUDA graphs: capture failed: RuntimeError: CUDA error: .* and the device is unusable; set cuda_graph=off"
    for trials in ([trial], [FAST, trial], [GraphTrial("no memory"), trial]):
        with pytest.raises(RunError, match=message):
            choose_graphs("auto", trials)
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    for found, expected in ((trial, RunError), (FAST, RuntimeError)):
        monkeypatch.setattr(graph_trial, "try_graphs", lambda *_, found=found, **__: (None, found))
        with pytest.raises(expected):
            build_graphs(config(0, "fp32"), gpt(), batch(0), ProcessGroups())


FAST = GraphTrial(None, 0.0633, 0.00827, True, 2 * GIB)


@pytest.mark.parametrize(
    ("mode", "trials", "is_taken", "line"),
    [
        (
            "auto", [FAST], True,
            "CUDA graphs: on; 8.27 ms for forward and backward of a micro-batch instead of 63.3, gradients equal bit "
            "for bit, 2 GiB of memory kept",
        ),
        ("auto", [FAST, GraphTrial("capture failed: x")], False, "CUDA graphs: off; capture failed: x (rank 1)"),
        (
            "auto", [GraphTrial(None, 0.1, 0.099, True, GIB)], False,
            "CUDA graphs: off; not faster (99 ms for forward and backward of a micro-batch instead of 100)",
        ),
        (
            "auto", [FAST, GraphTrial(None, 0.06, 0.01, True, 3 * GIB, is_memory_short=True)], False,
            "CUDA graphs: off; the 3 GiB that they keep would leave too little memory (10 ms for forward and backward "
            "of a micro-batch instead of 63.3)",
        ),
        (
            "on", [GraphTrial(None, 0.1, 0.099, False, GIB, is_memory_short=True)], True,
            "CUDA graphs: on; 99 ms for forward and backward of a micro-batch instead of 100, gradients equal within "
            "rounding, 1 GiB of memory kept",
        ),
    ],
)  # fmt: skip
def test_the_decision(mode: str, trials: list[GraphTrial], is_taken: bool, line: str) -> None:
    assert choose_graphs(mode, trials) == (is_taken, line)


def test_impossible_graphs_are_an_error_if_required() -> None:
    with pytest.raises(UserError, match=r"cuda_graph on: capture failed: x; use auto or off"):
        choose_graphs("on", [GraphTrial("capture failed: x")])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pipe_parallel_size": 2}, "pipe_parallel_size 2: stages exchange hidden states while they compute"),
        ({"model_parallel_size": 2}, "model_parallel_size 2: ranks exchange activations in every layer"),
        ({"context_parallel_size": 2}, "context_parallel_size 2: ranks exchange keys and values in every layer"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3: ranks gather parameters"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "zero_optimization.overlap_comm: "),
        ({"zero_optimization": {"stage": 1, **OFFLOAD}}, "zero_optimization.offload_optimizer: "),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous_gradients false: "),
        ({"attention_mask": "document"}, "attention_mask document: the documents of a batch decide"),
        ({"task": "parity_check"}, "task parity_check: its batches may have position ids"),
        ({"randomized_positions": 64}, "randomized_positions: the host draws positions in every step"),
        ({"hidden_dropout": 0.1}, "hidden_dropout 0.1: random numbers inside a graph are not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1: random numbers inside a graph are not supported"),
        ({"attention_backend": "flex"}, "attention_backend flex: FlexAttention keeps its masks outside"),
    ],
    ids=str,
)
def test_keys_that_conflict_with_graphs(keys: dict[str, Any], reason: str) -> None:
    """`auto` is reported on a GPU and silent on a CPU; `on` is rejected before anything starts."""
    chosen = tiny_config(Path(), **keys)
    is_tried, line = plan_graph_trial(chosen, torch.device("cuda"))
    assert not is_tried
    assert line is not None
    assert line.startswith("CUDA graphs: off; ")
    assert reason in line
    assert plan_graph_trial(chosen, torch.device("cpu")) == (False, None)
    problems = dict(validate_config(tiny_config(Path(), **keys, cuda_graph="on", device="auto")))
    assert reason in problems["cuda_graph"]
    assert problems["cuda_graph"].endswith("; use cuda_graph auto or off")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
        {"zero_optimization": {"stage": 0, "overlap_comm": True}},
        {"checkpoint_activations": True, "score_processor": "cdape"},
    ],
    ids=str,
)
def test_keys_compatible_with_graphs(keys: dict[str, Any]) -> None:
    for mode in ("auto", "on", True):
        chosen = tiny_config(Path(), **keys, cuda_graph=mode, device="auto")
        assert plan_graph_trial(chosen, torch.device("cuda")) == (True, None)
        assert "cuda_graph" not in dict(validate_config(chosen))
    off = tiny_config(Path(), **keys, cuda_graph=False)
    assert plan_graph_trial(off, torch.device("cuda")) == (False, None)


def test_graphs_on_a_cpu_are_rejected() -> None:
    with pytest.raises(UserError, match="cuda_graph on: this run uses the CPU"):
        resolve_run(tiny_config(Path(), cuda_graph="on", device="auto"), LocalHardware(num_gpus=0, num_cores=4))
    assert "device cpu" in dict(validate_config(tiny_config(Path(), cuda_graph="on", device="cpu")))["cuda_graph"]


def test_cached_tensors_live_as_long_as_the_graphs_that_read_them() -> None:
    """Evaluation at other lengths evicts cosines and sines from a cache; a replay still reads them."""
    chosen = tiny_config(Path(), pos_emb="rotary")
    model = build_model(chosen.model, chosen.position, VOCABULARY, seed=1).train()
    sample = batch(0)
    graphed = GraphedModel(TrainingPasses(model, with_log_z=False), sample["tokens"], sample["labels"], Rerun())
    encoding = next(module for module in model.modules() if isinstance(module, Rotary))
    length = sample["tokens"].shape[1]
    used = [turns for (tokens, *_), turns in encoding._rotations.items() if tokens.length == length]
    cached = [weakref.ref(x) for turns in used for x in turns]
    del used
    encoding._rotations.clear()
    gc.collect()
    assert cached
    assert all(reference() is not None for reference in cached)
    del graphed
    gc.collect()
    assert all(reference() is None for reference in cached)
