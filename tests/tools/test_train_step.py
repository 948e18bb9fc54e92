"""Benchmark of training steps with a tiny model, on a CPU and on a fake GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import train_step
from tools.bench.train_step import StepProblem

TINY = ("--shapes", "tiny:16:2", "--rounds", "2", "--dtype", "fp32")
METHODS = ["rotary", "kerple_log", "cdape", "plain"]
PROBLEM = StepProblem("tiny", 16, 2, "fp32", "cpu")


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return request.param


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
def test_a_rehearsal_has_every_model_and_field(
    device: str, command: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(train_step, *TINY, "--device", device, "--json", str(tmp_path / "a.json")) == 0
    result = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert list(result) == ["date", "command", "commit", "machine", "versions", "records"]
    assert [record["peer"] for record in result["records"]] == METHODS
    for record in result["records"]:
        expected = {"op": "train_step", "model": "tiny", "device": device, "dtype": "fp32", "B": 2, "T": 16}
        assert {key: record[key] for key in expected} == expected
        assert record["rounds"] == 2
        low, middle, high = record["ms"]["both"]
        assert 0 < low <= middle <= high
        assert record["tokens_per_second"] == pytest.approx(1e3 * 2 * 16 / middle, rel=0.01, abs=0.5)
        assert {"ratio_to_rotary", "ratio_to_kerple_log", "ratio_to_plain", "tflops"} < set(record)
        assert record[f"ratio_to_{record['peer']}"] == 1 if record["peer"] != "cdape" else True
        assert (record["mfu"] is None) == (device == "cpu")  # a CPU's peak FLOP/s is not known
        assert record["peak_memory_mb"] == (None if device == "cpu" else 5)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
def test_a_layer_alone(device: str, command: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--layer", "--methods", "kerple_log", "cdape", "--json", str(tmp_path / "a.json"))
    assert command(train_step, *TINY, "--device", device, *words) == 0
    records = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert [(record["op"], record["peer"]) for record in records] == [("layer", "kerple_log"), ("layer", "cdape")]
    assert all(record["ms"]["both"][1] > 0 and "mfu" not in record for record in records)


def test_a_layers_step_computes_the_gradients_of_all_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Any, ...]] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *words, **options: taken.append(grad(*words, **options)))
    layer = StepProblem("tiny", 16, 1, "fp32", "cpu", layer=True)
    for method in ("kerple_log", "cdape"):
        step = train_step.build_farfield(layer, method).step
        assert step is not None
        step()
        assert len(taken[-1]) > 12  # hidden states, two norms, four linear layers, r1 and r2
        assert all(gradient is not None for gradient in taken[-1])


def failing(refused: str) -> Callable[..., train_step.Candidate]:
    """Return candidates, one of which runs out of memory in its third step."""

    def make(problem: StepProblem, method: str) -> train_step.Candidate:
        steps = iter(range(9))

        def step() -> None:
            if next(steps) == 2 and method == refused:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

        return train_step.Candidate(step, 1.0)

    return make


def test_failures_are_reported_and_the_others_continue(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_step, "build_farfield", failing("kerple_log"))
    words = ("--device", "cpu", "--methods", "kerple_log", "cdape", "--json", str(tmp_path / "a.json"))
    assert command(train_step, *TINY, *words) == 1
    refused, fine = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert refused["ms"] is None
    assert refused["refusal"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert fine["rounds"] == 2
    assert "ratio_to_kerple_log" not in fine
    assert capsys.readouterr().err == f"error: kerple_log at tiny:16: {refused['refusal']}\n"


def test_unsupported_models_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(problem: StepProblem, method: str) -> train_step.Candidate:
        raise RuntimeError("no room")

    monkeypatch.setattr(train_step, "build_farfield", build)
    assert train_step.benchmark_problem(PROBLEM, 2, ["cdape"])[0]["refusal"] == "RuntimeError: no room"


@pytest.mark.parametrize(("at", "rounds"), [(1, [0, 0]), (3, [1, 0]), (7, [2, 1])])
def test_an_interrupted_run_keeps_its_measurements(
    at: int, rounds: list[int], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupted run keeps its measurements, except of a first step, which compiles.

    Args:
        at: number of steps of the two candidates before the interrupt; the first four warm up.
    """
    steps = iter(range(99))

    def step() -> None:
        if next(steps) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_step, "build_farfield", lambda problem, method: train_step.Candidate(step, 1.0))
    words = ("--device", "cpu", "--methods", "kerple_log", "cdape", "--json", str(tmp_path / "a.json"))
    with pytest.raises(KeyboardInterrupt):
        command(train_step, *TINY, *words)
    records = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert [record["rounds"] for record in records] == rounds
    assert all(record["cut"] for record in records)
    assert all((record["ms"] is None) == (record["rounds"] == 0) for record in records)


def test_an_interruption_while_models_are_built_is_recorded(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(problem: StepProblem, method: str) -> train_step.Candidate:
        if method == "cdape":
            raise KeyboardInterrupt
        return train_step.Candidate(lambda: None, 1.0)

    monkeypatch.setattr(train_step, "build_farfield", build)
    words = ("--device", "cpu", "--methods", "kerple_log", "cdape", "--json", str(tmp_path / "a.json"))
    with pytest.raises(KeyboardInterrupt):
        command(train_step, *TINY, *words)
    (record,) = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert (record["peer"], record["cut"], record["ms"]) == ("kerple_log", True, None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--shapes", "tiny:16", "huge:512"),
            "must be MODEL:LENGTH or MODEL:LENGTH:BATCH with MODEL one of tiny, 125M, 350M, not 'huge:512'",
        ),
        (("--shapes", "tiny:0"), "not 'tiny:0'"),
        (("--shapes", "tiny:8:0"), "not 'tiny:8:0'"),
        (("--shapes", "tiny"), "not 'tiny'"),
        (("--rounds", "1"), "--rounds: it must be an integer of at least 2, not '1'"),
        (("--methods", "alibi"), "--methods: invalid choice: 'alibi'"),
        (("--layer", "--methods", "plain"), "plain is a whole model"),
    ],
)
def test_a_bad_argument_is_one_line(words: tuple[str, ...], says: str, refuses: Callable[..., None]) -> None:
    refuses(train_step, *TINY, *words, says=says)
