"""Choice of `auto` on a GPU: by its own self-check, an earlier check, the run's previous choice, and agreement of
ranks.

The checks run on the CPU, which is declared a checked device; the candidates are replaced.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_model
from position_methods import build

from megatron.attention.backends.backend import AttentionFormula
from megatron.attention.backends.pytorch import ChunkedBackend, RowBlockBackend
from megatron.attention.check import trials as trials_module
from megatron.attention.check.check_result import BackendTrial, CheckRecord, CheckResult, read_records, write_records
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.model import backend_choice
from megatron.model.backend_choice import (
    AttentionTarget,
    BackendChoice,
    LayerType,
    agree_on_backend,
    choose_backends,
    get_local_rows_and_heads,
    load_backend_choice,
)
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.catalog import METHODS_VARIABLE
from megatron.position.token_range import ALL_HEADS
from megatron.utils.errors import RunError

MODEL = ModelOptions(num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=16, attention_chunk_rows=8)
POSITION = PositionOptions(pos_emb="kerple_log")
TARGET = AttentionTarget(torch.device("cpu"), torch.float32, batch=2, length=16)


class Groups(ProcessGroups):
    """Simulated ranks, which answer each query with a modification of this rank's answer."""

    changes: tuple[Callable[[Any], Any], ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        others = [change(value) for change in self.changes]
        return [*others[: self.rank], value, *others[self.rank :]]


def make_groups(*changes: Callable[[Any], Any], rank: int = 0) -> Groups:
    groups = Groups(Mesh(rank, ParallelSizes(data=len(changes) + 1)))
    object.__setattr__(groups, "changes", changes)
    return groups


class Wrong(RowBlockBackend):
    def __call__(self, inputs):
        return super().__call__(inputs) * 1.001


class Raising(RowBlockBackend):
    def __call__(self, inputs):
        raise RuntimeError("no such instruction")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaced candidates of every kind by name, their time per pass, and the names of tried candidates."""
    candidates = {
        "row blocks": RowBlockBackend(8),
        "wrong": Wrong(8),
        "raising": Raising(8),
        "slow": RowBlockBackend(4),
        "fast": RowBlockBackend(16),
    }
    seconds = {"row blocks": 0.002, "slow": 0.009, "fast": 0.001, "wrong": 0.0001}

    calls: list[str] = []
    real = trials_module.try_backends

    def try_backends(problem, backends):
        calls.extend(backends)
        order = iter([name for _ in range(50) for name in backends if name in seconds and name != "wrong"])
        return real(problem, backends, timer=lambda run, device: seconds[next(order)])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend_choice, "CHECKED_DEVICES", ("cpu",))
    monkeypatch.setattr(backend_choice, "list_candidates", lambda *_: dict(candidates))
    monkeypatch.setattr(backend_choice, "try_backends", try_backends)
    return {"candidates": candidates, "calls": calls, "seconds": seconds}


def choose(
    groups: ProcessGroups | None = None, *, name: str = "auto", target: AttentionTarget | None = TARGET, **changes
) -> BackendChoice:
    model = MODEL.replace(**changes)
    encoding, processor = build("kerple_log", "none")
    return choose_backends(
        name, model, [LayerType(POSITION, AttentionFormula(encoding, processor))], groups or make_groups(), target
    )


def test_the_fastest_correct_backend_is_chosen_and_reported(planted) -> None:
    choice = choose()
    assert choice.backends[0] is planted["candidates"]["fast"]
    (line,) = choice.lines
    assert line.startswith(
        "attention: fast, 2.00 times as fast as row blocks (1 ms instead of 2 for a layer), errors up to 0."
    )
    assert "times rounding in float32 (4 allowed); checked in" in line
    assert "; rejected: wrong errs in " in line
    assert line.endswith("; raising raised RuntimeError: no such instruction")
    assert [(trial.backend, trial.is_correct) for trial in choice.records[0].check_result.trials] == [
        ("row blocks", True), ("wrong", False), ("raising", False), ("slow", True), ("fast", True)
    ]  # fmt: skip


def test_random_states_and_modules_are_as_before(planted) -> None:
    encoding, _ = build("kerple_log", "none")
    values = [parameter.clone() for parameter in encoding.parameters()]
    state = torch.get_rng_state()
    choose_backends("auto", MODEL, [LayerType(POSITION, AttentionFormula(encoding))], make_groups(), TARGET)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(values, encoding.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in encoding.parameters())


def test_an_earlier_check_of_the_same_problem_is_reused(planted) -> None:
    first = choose()
    planted["calls"].clear()
    again = choose()
    assert planted["calls"] == []
    assert again.backends[0] is planted["candidates"]["fast"]
    assert again.records[0].check_result == first.records[0].check_result
    assert "result of an earlier check" in again.lines[0]
    choose(target=replace(TARGET, batch=1))  # another shape
    assert len(planted["calls"]) == 5


OWN_METHOD = """
from megatron.position.encoding import Encoding, ScoreTerms


class Own(Encoding):
    formula = "none or a bias"
    source = "test"
    advice = "test"
    {}
"""
BIAS = """adds_bias = True

    def table(self, distances):
        return ScoreTerms(bias=-distances[None].expand(self.dims.num_heads, -1))
"""


def test_a_changed_method_of_the_users_own_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias excludes PyTorch's fused attention, which the check of the version without a bias chose."""
    times, candidates_of = count(1), backend_choice.list_candidates
    monkeypatch.setattr(
        backend_choice,
        "list_candidates",
        lambda *arguments: {**candidates_of(*arguments), "other": RowBlockBackend(4)},
    )
    monkeypatch.setattr(
        backend_choice,
        "try_backends",
        lambda problem, backends: trials_module.try_backends(problem, backends, timer=lambda *_: next(times)),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend_choice, "CHECKED_DEVICES", ("cpu",))
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path / "methods"))
    file = tmp_path / "methods" / "encodings" / "own.py"
    file.parent.mkdir(parents=True)
    chosen = []
    for body in ("takes_positions = False", BIAS):
        file.write_text(OWN_METHOD.format(body))
        encoding, _ = build("own", "none")
        layers = [LayerType(PositionOptions(pos_emb="own"), AttentionFormula(encoding))]
        chosen.append(choose_backends("auto", MODEL, layers, make_groups(), TARGET).name)
    assert chosen == ["sdpa", "row blocks"]


def test_documents_are_checked_if_the_run_masks_them(planted) -> None:
    """If the run masks documents, a candidate that ignores them is rejected, although it is correct for single
    documents.
    """

    class Ignoring(RowBlockBackend):
        def __call__(self, inputs):
            return super().__call__(replace(inputs, document_starts=None))

    planted["candidates"]["slow"] = Ignoring(4)
    assert choose().records[0].check_result.get_trial("slow").is_correct
    starts = torch.tensor([[0] * 16, [0] * 5 + [5] * 11])
    found = choose(target=replace(TARGET, document_starts=starts)).records[0].check_result
    assert found.get_trial("slow").refusal.startswith("errs in ")
    assert found.get_trial("fast").is_correct
    assert found.problem["documents"] == [1, 2]
    planted["calls"].clear()
    choose(target=replace(TARGET, document_starts=starts.clone()))
    assert planted["calls"] == []
    choose(target=replace(TARGET, document_starts=torch.tensor([[0] * 16, [0] * 6 + [6] * 10])))
    assert len(planted["calls"]) == 5


def test_untried_backends_are_tried_later_and_rejected_ones_are_not(planted, monkeypatch) -> None:
    real = backend_choice.try_backends

    def hurry(problem, backends):
        trials = real(problem, {name: backend for name, backend in backends.items() if name != "fast"})
        return [*trials, BackendTrial("fast", "was not tried: the check had taken 20 s", is_final=False)]

    monkeypatch.setattr(backend_choice, "try_backends", hurry)
    first = choose()
    assert first.backends[0] is planted["candidates"]["row blocks"]
    assert "rejected: wrong errs" in first.lines[0]
    assert "fast was not tried" in first.lines[0]
    monkeypatch.setattr(backend_choice, "try_backends", real)
    planted["calls"].clear()
    second = choose()
    assert second.backends[0] is planted["candidates"]["fast"]
    assert planted["calls"] == ["row blocks", "slow", "fast"]


def test_forced_disabled_and_random_runs_are_not_checked(planted) -> None:
    assert isinstance(choose(name="chunked").backends[0], ChunkedBackend)
    assert choose(name="chunked").lines == ()
    off = choose(attention_check=False)
    assert off.backends[0] is planted["candidates"]["row blocks"]
    assert off.lines[0].startswith("attention: row blocks, saved up to 1,024 keys in training: sdpa cannot add")
    assert off.lines[0].endswith("; unchecked (attention_check: false)")
    assert "attention_dropout is random" in choose(attention_dropout=0.1).lines[0]
    assert choose(target=None).lines == ()
    assert planted["calls"] == []


def test_the_only_possible_backend_is_not_checked(planted) -> None:
    for name in ("wrong", "raising", "slow", "fast"):
        del planted["candidates"][name]
    assert choose().lines[0].endswith("; no other backend supports this model")
    assert planted["calls"] == []


def test_row_blocks_are_used_if_no_backend_is_correct(planted) -> None:
    for name in ("row blocks", "slow", "fast"):
        del planted["candidates"][name]
    planted["candidates"]["row blocks"] = Wrong(8)
    choice = choose()
    assert choice.backends[0] is planted["candidates"]["row blocks"]
    assert choice.lines[0].startswith(
        "attention: row blocks, because no backend passed the check; rejected: wrong errs in"
    )


def test_a_lost_device_is_reported_by_all_ranks_and_remembered(planted, monkeypatch) -> None:
    usable = [False]
    monkeypatch.setattr(trials_module, "is_device_usable", lambda device: usable[0])
    del planted["candidates"]["wrong"]
    with pytest.raises(
        RunError, match="attention by raising raised RuntimeError: no such instruction, and the device is unusable"
    ):
        choose()
    lost = "attention by x, and the device is unusable"
    with pytest.raises(RunError, match="the device is unusable"):  # raised on the healthy rank too
        choose(make_groups(lambda value: (value[0], lost) if isinstance(value, tuple) else value))
    planted["calls"].clear()
    usable[0] = True
    choice = choose()
    assert "raising" not in planted["calls"]
    assert choice.backends[0] is planted["candidates"]["fast"]
    assert "rejected: raising raised RuntimeError" in choice.lines[0]


def test_a_random_state_that_a_lost_device_cannot_restore_does_not_hide_the_reason(planted, monkeypatch) -> None:
    @contextmanager
    def fork_rng(devices):
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with monkeypatch.context() as lost:
        lost.setattr(trials_module, "is_device_usable", lambda device: False)
        with pytest.raises(RunError, match="the next start skips this backend"):
            choose()
    with pytest.raises(RuntimeError, match="CUDA error"):  # any other failure is shown as it is
        choose()


# Resumed runs.


def record(run: Path, backend: str, check_result: CheckResult) -> AttentionTarget:
    run.mkdir()
    write_records(run, [CheckRecord(backend, "attention: …", check_result)])
    return replace(TARGET, resumed_run=run)


def test_a_resumed_run_reuses_its_backend(planted, tmp_path: Path) -> None:
    (found,) = choose().records
    target = record(tmp_path / "run", "slow", found.check_result)
    planted["calls"].clear()
    kept = choose(target=target)
    assert kept.backends[0] is planted["candidates"]["slow"]
    assert planted["calls"] == []
    assert "; same as before; result of an earlier check" in kept.lines[0]
    assert kept.lines[0].startswith("attention: slow, 0.22 times as fast as row blocks")
    # In another layout the backend is checked again, and kept if correct.
    other = choose(target=replace(target, batch=1))
    assert other.backends[0] is planted["candidates"]["slow"]
    assert len(planted["calls"]) == 5


def test_a_resumed_run_on_another_gpu_chooses_again(planted, tmp_path: Path) -> None:
    (found,) = choose().records
    elsewhere = replace(found.check_result, key={**found.check_result.key, "card": {"name": "A100"}})
    target = record(tmp_path / "run", "slow", elsewhere)
    assert choose(target=target).backends[0] is planted["candidates"]["fast"]


def test_unchecked_backends_are_not_stored_as_evidence(planted, tmp_path: Path) -> None:
    """A rehearsal on a device that computes nothing gives no evidence."""
    (found,) = choose().records
    void = replace(found.check_result, trials=tuple(replace(t, excess={}) for t in found.check_result.trials))
    target = record(tmp_path / "run", "triton", void)
    assert load_backend_choice(tmp_path / "run", torch.device("cpu"), torch.float32) is None
    for path in (tmp_path / "cache/farfield/attention_check").iterdir():
        path.unlink()
    planted["calls"].clear()
    assert choose(target=target).backends[0] is planted["candidates"]["fast"]
    assert len(planted["calls"]) == 5


def test_a_damaged_record_is_ignored(planted, tmp_path: Path) -> None:
    (tmp_path / "attention_check.json").write_text('{"backend": "slow", "trials": [')
    assert choose(target=replace(TARGET, resumed_run=tmp_path)).backends[0] is planted["candidates"]["fast"]


def test_a_stored_choice_applies_only_to_the_same_gpu(planted, tmp_path: Path) -> None:
    (found,) = choose().records
    cpu = torch.device("cpu")
    record(tmp_path / "run", "triton", found.check_result)
    assert load_backend_choice(tmp_path / "run", cpu, torch.float32) == "triton"
    assert load_backend_choice(tmp_path / "run", cpu, torch.bfloat16) is None
    assert load_backend_choice(tmp_path, cpu, torch.float32) is None
    record(tmp_path / "flex", "flex", found.check_result)
    assert load_backend_choice(tmp_path / "flex", cpu, torch.float32) is None
    elsewhere = replace(found.check_result, key={**found.check_result.key, "card": {"name": "A100"}})
    record(tmp_path / "other", "triton", elsewhere)
    assert load_backend_choice(tmp_path / "other", cpu, torch.float32) is None


# Ranks.


def check_result(card: str = "H100", **milliseconds: float | str) -> CheckResult:
    """Build evidence; a number is the time of a correct backend, a string the reason for rejection."""
    trials = [
        BackendTrial(name, found)
        if isinstance(found, str)
        else BackendTrial(name, excess={"dq": 1.0}, milliseconds=found)
        for name, found in milliseconds.items()
    ]
    key = {"card": {"name": card}, "software": {}, "work": {"dtype": "bfloat16"}}
    return CheckResult(key, {}, tuple(trials), 3.2)


def test_ranks_use_the_choice_of_rank_0() -> None:
    found = [check_result(sdpa=1.0, triton=2.0), check_result(sdpa=2.0, triton=1.9)]
    chosen, lines = agree_on_backend(found, "sdpa", None, was_checked_earlier=False)
    assert chosen == "sdpa"
    assert lines == [
        "attention: sdpa, 2.00 times as fast as triton (1 ms instead of 2 for a layer), errors up to 1 "
        "times rounding in bfloat16 (4 allowed); checked in 3 s"
    ]


def test_ranks_on_another_gpu_with_another_choice_are_named_once() -> None:
    found = [check_result(sdpa=1.0, triton=2.0), *[check_result("A100", sdpa=2.0, triton=1.9)] * 3]
    chosen, (_, line) = agree_on_backend(found, "sdpa", None, was_checked_earlier=True)
    assert chosen == "sdpa"
    assert line == (
        "attention: rank 1 has another GPU (A100, rank 0 H100), on which triton would be faster; all ranks use "
        "rank 0's choice"
    )


def test_a_backend_that_fails_on_one_rank_is_used_by_none() -> None:
    found = [
        check_result(sdpa=2.0, triton=1.0),
        check_result(sdpa=2.0, triton=1.0),
        check_result(sdpa=2.0, triton="errs in dq"),
    ]
    chosen, lines = agree_on_backend(found, "sdpa", "triton", was_checked_earlier=False)
    assert chosen == "sdpa"
    assert lines[0].startswith("attention: sdpa, the only backend that passed the check (2 ms for a layer)")
    assert lines[0].endswith("; rejected: triton errs in dq on rank 2")


def test_a_backend_that_a_rank_lacks_is_used_by_none() -> None:
    """A node may have other software, for example no Triton."""
    found = [check_result(sdpa=2.0, triton=1.0), check_result(sdpa=2.0)]
    chosen, lines = agree_on_backend(found, "sdpa", None, was_checked_earlier=False)
    assert chosen == "sdpa"
    assert lines[0].endswith("; rejected: triton is not available on rank 1")


def test_a_rank_with_a_single_backend_checks_it_with_the_others(planted) -> None:
    """Ranks that check gather their results, and would wait for a rank that does not."""
    for name in ("wrong", "raising", "slow", "fast"):
        del planted["candidates"][name]
    sent: list[Any] = []
    choose(make_groups(lambda value: sent.append(value) or (2 if isinstance(value, int) else value)))
    assert any(isinstance(value, tuple) for value in sent)


def test_all_ranks_agree_and_each_kind_of_gpu_is_stored_once(planted) -> None:
    """All ranks use rank 0's choice, although rank 1's check prefers another backend; each kind of GPU is stored
    once.
    """

    def of_rank_0(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        mine, error = value
        changed = [replace(t, milliseconds=0.1) if t.backend == "slow" else t for t in mine.trials]
        return replace(mine, trials=tuple(changed)), error

    choice = choose(make_groups(of_rank_0, rank=1))
    assert choice.backends[0] is planted["candidates"]["slow"]
    assert choice.records[0].check_result.get_trial("slow").milliseconds == 0.1
    # Rank 0 with the same key stores the result for all.
    planted["calls"].clear()
    choose()
    assert len(planted["calls"]) == 5


@pytest.mark.parametrize(
    ("sizes", "rank", "has_processor", "rows", "heads"),
    [
        ({}, 0, True, [(0, 16)], ALL_HEADS),
        ({"context": 2}, 1, False, [(4, 12)], ALL_HEADS),
        ({"context": 2}, 0, True, [(0, 4), (12, 16)], ALL_HEADS),
        ({"tensor": 2}, 1, False, [(0, 16)], slice(2, 4)),
        ({"tensor": 2}, 0, True, [(0, 4), (12, 16)], ALL_HEADS),
    ],
)
def test_checked_rows_and_heads_are_those_of_the_rank(sizes, rank, has_processor, rows, heads) -> None:
    groups = ProcessGroups(Mesh(rank, ParallelSizes(**sizes)))
    found = get_local_rows_and_heads(POSITION, 4, has_processor, groups, TARGET)
    ranges = [(tokens.start, tokens.stop) for tokens in found[0]]
    joined = [(4, 12)] if ranges == [(4, 8), (8, 12)] else ranges
    assert (joined, found[1]) == (rows, heads)


def test_a_model_is_built_with_the_chosen_backend(planted, tmp_path: Path) -> None:
    gpt = build_model(MODEL, POSITION, 40, seed=3, target=TARGET)
    assert {id(layer.self_attention.core_attention.backend) for layer in gpt.decoder.layers} == {
        id(planted["candidates"]["fast"])
    }
    gpt.backend_choice.write_records(tmp_path)
    assert read_records(tmp_path) == list(gpt.backend_choice.records)
    same = build_model(MODEL, POSITION, 40, seed=3)
    assert same.backend_choice.lines == ()
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), same.parameters(), strict=True))
