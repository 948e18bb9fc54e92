"""GPU visit: its page compares times with the last record of the same machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import kernel_counters, profile_step
from tools.bench.profile_step import format_console_lines, measure_machine, profile_candidate
from tools.bench.train_step import StepProblem, build_candidate
from tools.gpu import visit
from tools.gpu.goals import VISIT_GOALS
from tools.gpu.parts import VISIT_SECONDS, list_visit_parts
from tools.gpu.visit_page import list_times, render_visit

STAMP = {"date": "2026-11-21", "command": "python", "commit": None, "machine": "H200", "versions": {"torch": "2"}}
STEP = {"op": "train_step", "peer": "cdape", "model": "350M", "B": 32, "T": 512}


def build_result(milliseconds: float, machine: str = "H200") -> dict[str, Any]:
    cost = {"tokens_per_second": 163840, "ratio_to_kerple_log": 1.25, "mfu": 0.2, "peak_memory_mb": 5.0}
    record = {**STEP, "dtype": "bf16", **cost, "ms": {"both": [1.0, milliseconds, 300.0]}}
    refused = {**STEP, "peer": "plain", "ms": None, "refusal": "out of memory"}
    profile = {**STEP, "op": "profile", "wall_ms": 2 * milliseconds}
    parts = {
        "step_512": {"exit": 0, "seconds": 7.0, "records": [record, refused]},
        "profile": {"exit": "cut after 150 s", "seconds": 150.0, "records": [profile]},
        "bias": {"exit": 1, "seconds": 1.0},
    }
    return {**STAMP, "machine": machine, "parts": parts}


def test_the_page_has_ratios_to_the_last_record_of_the_same_machine() -> None:
    page = render_visit(build_result(100.0), build_result(200.0))
    shape = "peer cdape, model 350M, dtype bf16, B 32, T 512"
    assert f"| `step_512` | op train_step, {shape} | 100.000 | 200.0 | 0.500 |" in page
    assert "| `profile` | op profile, peer cdape, model 350M, B 32, T 512 | 200.000 | 400.0 | 0.500 |" in page
    assert "cut after 150 s" in page
    assert "- `step_512`, plain: out of memory" in page
    assert "| train_step | 350M | 512 | 32 | bf16 | cdape | 100.00 | 163,840 | — | 1.250 | — | 0.200 | 5 |" in page
    kept = build_result(100.0)
    kept["parts"]["step_512"]["kept"] = "2026-11-20"
    assert "| `step_512` | done on 2026-11-20 | 7 |" in render_visit(kept, build_result(200.0))
    assert render_visit(kept, build_result(200.0)).count("| 0.500 |") == 1
    for last in (None, build_result(200.0, "A100")):
        assert "0.500" not in render_visit(build_result(100.0), last)
    assert len(list_times(build_result(1.0))) == 2


def test_the_page_has_the_memory_of_trainings_beside_the_plan() -> None:
    training = {"case": "zero_1", "model": "350M", "T": 512, "B": 1, "eager_peak_gb": 6.3, "planned_gb": 6.0}
    training["equal"] = False
    failed = {"case": "fp16", "model": "350M", "T": 512, "B": 1, "failure": "OutOfMemoryError"}
    result = build_result(100.0)
    assert "plan, GB" not in render_visit(result, None)
    result["parts"]["training"] = {"exit": 0, "seconds": 9.0, "records": [training, failed]}
    assert "| zero_1 | 350M | 1 × 512 | **no** | 6.30 | 6.00 | 1.050 |" in render_visit(result, None)
    assert "- `training`, fp16: OutOfMemoryError" in render_visit(result, None)


def test_the_page_has_goals_counters_rates_and_evidence() -> None:
    result = build_result(100.0)
    counted = {"op": "counters", "peer": "cdape", "B": 32, "H": 16, "T": 512, "d": 64}
    stalls = {"wait": 2.5, "selected": 1.0, "barrier": 0.75, "drain": 0.01, "no_instruction": 3.25}
    kernels = [
        {**counted, "kernel": "forward", "issued_clocks": 4.5, "load_store_clocks": 6.0, "stalls": stalls},
        {**counted, "kernel": "backward", "ns": 9000.0, "issued_clocks": 13.0, "load_store_clocks": 16.5},
    ]
    rate = {"op": "instruction_rate", "peer": "movmatrix", "warps": 8, "clocks": 4.01}
    run = {"op": "evidence", "peer": "fox", "seed": 1, "perplexity": {"fox": {"512": 9.5, "16384": 8.25}}}
    result["parts"] |= {
        "counters": {"exit": 0, "seconds": 9.0, "records": kernels},
        "rates": {"exit": 0, "seconds": 9.0, "records": [rate]},
        "evidence": {"exit": 0, "seconds": 9.0, "records": [{**run, "seconds": 99.0, "estimated_seconds": 120.0}]},
    }
    page = render_visit(result, None)
    assert "| 17.5 in 2 kernels | ≤ 17 | not met |" in page
    assert "| 22.5 in 2 kernels | ≤ 23 | met |" in page
    assert "| no_instruction 3.25, wait 2.50, selected 1.00, barrier 0.75 |" in page
    assert "| movmatrix | 4.01 |" in page
    assert "| fox | 9.50 | 8.25 | 99 (120) |" in page
    assert "not measured: not run" in page
    assert {goal.part for goal in VISIT_GOALS} <= {part.name for part in list_visit_parts()}


def test_the_most_important_parts_fit_in_a_visit_and_come_first() -> None:
    names = [part.name for part in list_visit_parts()]
    order = ("profile", "rates", "correct_bias", "correct_gates", "counters", "step_512", "step_8192", "training")
    assert sorted(order, key=names.index) == list(order)
    first = list_visit_parts()[: names.index("evidence")]
    assert {part.name for part in first} >= set(order)
    assert sum(part.seconds for part in first) <= VISIT_SECONDS
    counters = next(part for part in first if part.name == "counters")
    seconds = int(counters.command[counters.command.index("--seconds") + 1])
    assert len(kernel_counters.OPS) * seconds < counters.seconds


def test_a_visit_begins_where_the_last_one_ended() -> None:
    """Parts that ended well are kept while machine, versions and sources are the same, with the date of measurement."""
    current = {"machine": "H200", "versions": {"torch": "2"}, "sources": "a"}
    last = {**build_result(1.0), "sources": "a"}
    last["parts"]["evidence"] = {"exit": 0, "seconds": 1.0}
    last["parts"]["step_512"]["records"].pop()  # the refused method
    uncounted = {"op": "counters", "peer": "cdape", "refusal": "ncu: TimeoutExpired after at most 29 s"}
    last["parts"]["counters"] = {"exit": 0, "seconds": 30.0, "records": [uncounted]}
    chosen = list_visit_parts()
    kept = visit.select_kept_parts(chosen, last, current)
    assert list(kept) == ["step_512"]
    assert kept["step_512"] == {**last["parts"]["step_512"], "kept": STAMP["date"]}
    again = {**last, "date": "2026-12-01", "parts": kept}
    assert visit.select_kept_parts(chosen, again, current) == kept
    assert visit.select_kept_parts(chosen, None, current) == {}
    for name, other in (("machine", "A100"), ("versions", {"torch": "3"}), ("sources", "b")):
        assert visit.select_kept_parts(chosen, last, {**current, name: other}) == {}


def test_parts_that_are_not_chosen_stay_in_the_record(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {**build_result(1.0), "sources": visit.compute_sources_digest()}
    last["parts"]["step_512"]["records"].pop()  # the refused method
    (tmp_path / "last.json").write_text(json.dumps(last))
    runs: list[tuple[list[str], list[str]]] = []

    def run_parts(chosen: list[Any], path: Path, *, kept: dict[str, Any], **rest: Any) -> dict[str, Any]:
        runs.append(([part.name for part in chosen], list(kept)))
        return {"parts": {}}

    monkeypatch.setattr(visit, "RECORD", tmp_path / "last.json")
    monkeypatch.setattr(visit, "collect_provenance", lambda *_: STAMP)
    monkeypatch.setattr(visit, "run_parts", run_parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command(visit, "--parts", "rates") == 0
    assert command(visit, "--parts", "step_512", "--again") == 0
    assert command(visit, "--parts", "step_512", "rates", "--again") == 0
    assert runs == [(["rates"], ["step_512"]), (["step_512"], []), (["rates", "step_512"], [])]
    capsys.readouterr()
    assert command(visit, "--parts", "step_512") is None
    assert capsys.readouterr().out.endswith("nothing is left to measure\n")
    assert len(runs) == 3


def test_the_digest_follows_the_commands_of_the_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tools/gpu").mkdir(parents=True)
    monkeypatch.setattr(visit, "ROOT", tmp_path)
    digests = set()
    for text in ("one", "two"):
        (tmp_path / "tools/gpu/parts.py").write_text(text)
        digests.add(visit.compute_sources_digest())
    assert len(digests) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")
def test_without_a_gpu_it_suggests_a_rehearsal(refuses: Callable[..., None]) -> None:
    refuses(visit, says="no CUDA device found; --rehearse")


def test_a_rehearsal_does_not_write_over_a_record(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(visit, "run_parts", lambda chosen, path, **rest: written.append(path) or {"parts": {}})
    assert command(visit, "--rehearse") == 0
    assert written == [visit.REHEARSAL_RECORD]


def test_a_step_is_profiled_on_a_cpu() -> None:
    problem = StepProblem("tiny", 8, 1, "fp32", "cpu")
    record = profile_candidate(problem, "kerple_log", build_candidate(problem, "kerple_log"))
    assert record["wall_ms"] > 0
    assert record["host_ops"]
    machine = measure_machine("cpu")
    assert machine["launch_host_us"] > 0
    for each in (record, machine):
        json.dumps(each)
        assert format_console_lines(each)


def test_methods_without_time_for_a_profile_are_recorded_as_not_measured(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the part would count as complete, and no later visit would measure them."""
    clock = iter(range(0, 1000, 50))
    machine = {"op": "machine", "device": "cpu"}

    def profile(problem: StepProblem, name: str, candidate: object) -> dict[str, Any]:
        times = {"wall_ms": 1.0, "host_ms": 1.0, "busy_ms": 1.0, "launches": 0.0, "kernels": []}
        return {**profile_step.describe_candidate(problem, name), **times}

    monkeypatch.setattr(profile_step.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(profile_step, "measure_machine", lambda device: machine)
    monkeypatch.setattr(profile_step, "build_candidate", lambda problem, name: None)
    monkeypatch.setattr(profile_step, "profile_candidate", profile)
    words = ("--shapes", "tiny:8:1", "--methods", "kerple_log", "plain", "--seconds", "75", "--device", "cpu")
    assert command(profile_step, *words, "--json", str(tmp_path / "a.json")) == 1
    _, done, left = json.loads((tmp_path / "a.json").read_text())["records"]
    assert (done["peer"], "refusal" in done) == ("kerple_log", False)
    assert (left["peer"], left["B"], left["refusal"]) == ("plain", 1, "no time left")
