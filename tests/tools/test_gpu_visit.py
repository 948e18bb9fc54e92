"""GPU visit: its page compares times with the last record of the same machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench.profile_step import format_console_lines, measure_machine, profile_candidate
from tools.bench.train_step import StepProblem, build_candidates
from tools.gpu import visit
from tools.gpu.visit import list_times, render_visit

STAMP = {"date": "2026-11-21", "command": "python", "commit": None, "machine": "H200", "versions": {"torch": "2"}}
STEP = {"op": "train_step", "peer": "cdape", "model": "350M", "B": 32, "T": 512}


def build_result(milliseconds: float, machine: str = "H200") -> dict[str, Any]:
    record = {**STEP, "ms": {"both": [1.0, milliseconds, 300.0]}}
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
    assert "| `step_512` | op train_step, peer cdape, model 350M, B 32, T 512 | 100.000 | 200.0 | 0.500 |" in page
    assert "| `profile` | op profile, peer cdape, model 350M, B 32, T 512 | 200.000 | 400.0 | 0.500 |" in page
    assert "cut after 150 s" in page
    assert "- `step_512`, plain: out of memory" in page
    for last in (None, build_result(200.0, "A100")):
        assert "0.500" not in render_visit(build_result(100.0), last)
    assert len(list_times(build_result(1.0))) == 2


def test_the_page_has_the_memory_of_trainings_beside_the_plan() -> None:
    training = {"case": "zero_1", "model": "350M", "T": 512, "B": 1, "eager_peak_gb": 6.3, "planned_gb": 6.0}
    failed = {"case": "fp16", "model": "350M", "T": 512, "B": 1, "failure": "OutOfMemoryError"}
    result = build_result(100.0)
    assert "plan, GB" not in render_visit(result, None)
    result["parts"]["training"] = {"exit": 0, "seconds": 9.0, "records": [training, failed]}
    assert "| zero_1 | 350M | 1 × 512 | 6.30 | 6.00 | 1.050 |" in render_visit(result, None)


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
    record = profile_candidate(problem, "kerple_log", build_candidates(problem, ["kerple_log"])["kerple_log"])
    assert record["wall_ms"] > 0
    assert record["host_ops"]
    machine = measure_machine("cpu")
    assert machine["launch_host_us"] > 0
    for each in (record, machine):
        json.dumps(each)
        assert format_console_lines(each)
