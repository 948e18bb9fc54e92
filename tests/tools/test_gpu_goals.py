"""Page of goals: every number compared with its limit, and a reason for each missing number."""

from pathlib import Path
from typing import Any

import pytest

from tools.gpu import parts as gpu_parts
from tools.gpu.goals import GOALS, VISIT_GOALS, check_goals, render_page

HEAD = {
    "date": "2026-11-21", "command": "python tools/gpu/check.py", "commit": "1234567", "machine": "NVIDIA H200",
    "versions": {"torch": "2.11.0"}, "rehearsal": False, "seconds": 431.5,
}  # fmt: skip

BIAS = "biased_attention"


def kernel(peer: str, both: float | None, ratio: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    times = None if both is None else {part: [both] * 3 for part in ("forward", "backward", "both")}
    made = {
        "op": "cdape", "peer": peer, "device": "cuda", "dtype": "bfloat16", "B": 8, "T": 2048, "H": 12, "d": 64, "k": 3,
        "width": 32, "ms": times, "ratio": ratio, "ratio_to": "triton", "peak_memory_mb": 100.0, "error": 1e-3,
        "judged_at": 2048, "rounds": 9,
    }  # fmt: skip
    return made | fields


def step(peer: str, batch: int, ratio: float, **fields: Any) -> dict[str, Any]:
    made = {
        "op": "train_step", "peer": peer, "model": "350M", "device": "cuda", "dtype": "bf16", "B": batch, "T": 512,
        "ms": {"both": [20.0, 20.0, 20.0]}, "tokens_per_second": 1000, "ratio_to_kerple_log": ratio, "tflops": 100.0,
        "mfu": 0.4, "peak_memory_mb": 900.0, "rounds": 15,
    }  # fmt: skip
    return made | fields


def part(*records: dict[str, Any], end: int | str = 0, **fields: Any) -> dict[str, Any]:
    return {"exit": end, "seconds": 10.0, "records": list(records), **fields}


def measured() -> dict[str, Any]:
    """Complete check in which one ambitious goal, the memory of one kernel, a test and a peer fail."""
    gated = [kernel("triton", None, None, dtype=dtype, error=2e-3) for dtype in ("bfloat16", "float32")]
    judge = kernel("eager", None, None)
    trials = [
        {"backend": name, "ms": ms, "excess": 0.9, "memory_mb": 9.0, "first_seconds": 3.0, "refusal": refusal}
        for name, ms, refusal in (("row blocks", 4.0, None), ("triton", 1.0, None), ("flex", None, "raised X: a | b"))
    ]
    checked = {"op": "self_check", "method": "cdape", "dtype": "bf16", "B": 8, "T": 512, "taken": "triton"}
    return {
        "self_check": part(checked | {"trials": trials}),
        "correct_bias": part(*gated, judge),
        "correct_cdape": part(gated[0], gated[1] | {"refusal": "errs by 1 in output | dq"}, judge, end=1),
        "step_350m": part(step("kerple_log", 1, 1.0), step("cdape", 1, 1.2), step("kerple_log", 32, 1.0),
                          step("cdape", 32, 1.12)),
        "cdape": part(kernel("triton", 4.0), kernel("appendix", 30.0, 7.5), kernel("flash", 1.0, 0.25)),
        "cdape_compiled": part(kernel("triton", 4.0), kernel("appendix compiled", 20.0, 5.0)),
        "bias": part(*(kernel(peer, 2.0 * ratio, ratio, T=length, op=BIAS)
                       for length, peer, ratio in ((2048, "triton", 1.0), (2048, "flash", 0.8), (8192, "triton", 1.0),
                                                   (8192, "flash", 0.5), (8192, "flash cudnn", 0.4)))),
        "flex": part(kernel("triton", 2.0), kernel("flex learned", None, None, refusal="Unsupported: no"), end=1),
        "memory": part(*(kernel("triton", 1.0, op=op, T=length, peak_memory_mb=memory)
                         for op, length, memory in (("cdape", 4096, 100.0), ("cdape", 8192, 205.0),
                                                    (BIAS, 4096, 50.0), (BIAS, 8192, 190.0)))),
        "long": part(kernel("triton", 7000.0, T=131072, peak_memory_mb=2500.0, rounds=1, cut=True),
                     end="cut after 50 s"),
        "long_layer": {"exit": "not run: needs megatron-core", "seconds": 0.0},
        "tests": {"exit": 1, "seconds": 100.0, "failed": ["tests.kernels.test_op::test_error"],
                  "counts": {"tests": 500, "failures": 1, "errors": 0, "skipped": 20}},
    }  # fmt: skip


def test_every_goal_reads_a_part_that_is_run() -> None:
    assert {goal.part for goal in GOALS} <= {part.name for part in gpu_parts.list_parts()}


def test_a_part_of_one_size_has_its_largest_unless_it_was_cut() -> None:
    """A visit has one micro-batch, measured or not; a check that is cut at the smallest of two has no largest."""
    records = step("kerple_log", 32, 1.0), step("cdape", 32, 1.12)
    for end, reported in ((0, "1.120"), ("cut after 5 s", "—")):
        done = part(*records, end=end)
        rows = check_goals({**HEAD, "parts": {"step_350m": done}}, GOALS)
        large = [row for row in rows if row[0].endswith("bf16, micro-batch 32")]
        assert large
        assert {row[1].split()[0] for row in large} == {reported}
        rows = check_goals({**HEAD, "parts": {"step_512": done}}, VISIT_GOALS)
        (row,) = [row for row in rows if row[0].startswith("350M step, CDAPE")]
        assert row[1].split()[0] == "1.120"


def test_each_goal_has_a_line_for_each_level_with_number_limit_and_verdict() -> None:
    rows = check_goals({**HEAD, "parts": measured()})
    assert len(rows) == sum(len(goal.levels) for goal in GOALS)
    found = [(reported.split(" ")[0], wanted, met) for _, reported, wanted, met in rows]
    assert found == [
        ("1", "all", "met"),
        ("2", "all", "met"),
        ("1", "all", "not met"),
        ("1.200", "≤ 1.33, whatever happens", "met"),
        ("1.200", "≤ 1.15, wanted", "not met"),
        ("1.200", "≤ 1.10, moonshot", "not met"),
        ("1.120", "≤ 1.33, whatever happens", "met"),
        ("1.120", "≤ 1.15, wanted", "met"),
        ("1.120", "≤ 1.10, moonshot", "not met"),
        ("7.50", "≥ 5", "met"),
        ("7.50", "≥ 10", "not met"),
        ("5.00", "—", ""),
        ("1.25", "≤ 1.35", "met"),
        ("2.00", "≤ 1.35", "not met"),
        ("2.50", "—", ""),
        ("—", "≥ 1.3", "not measured: Unsupported: no"),
        ("2.05", "about 2 (≤ 2.2)", "met"),
        ("3.80", "about 2 (≤ 2.2)", "not met"),
        ("7.00", "runs on one GPU", "met"),
        ("—", "runs on one GPU", "not measured: not run: needs megatron-core"),
        ("479", "all pass", "not met"),
    ]
    assert "7.00 s, 2.5 GB (T = 131,072, cut to 1 rounds)" in rows[18]


def test_the_page_is_whole_and_readable() -> None:
    made = render_page({**HEAD, "parts": measured()})
    assert made.startswith("# GPU check\n\n2026-11-21, NVIDIA H200; torch 2.11.0; `python tools/gpu/check.py`.")
    assert "rehearsal" not in made
    assert "* correct_cdape: triton at T = 2048 in float32: errs by 1 in output \\| dq" in made
    assert "* tests: tests.kernels.test_op::test_error" in made
    assert "* long: cut after 50 s" in made
    assert "| long | cut after 50 s | 10 |" in made
    assert "| cdape | bf16 | 512 | 8 | triton | 1 | 0.9 | 9 | 3 | taken |" in made
    assert "| flex | — | 0.9 | 9 | 3 | raised X: a \\| b |" in made
    for block in made.split("\n\n"):
        if block.startswith("|"):
            assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1
    assert "A rehearsal on a CPU" in render_page({**HEAD, "rehearsal": True, "parts": {}})


def test_goals_are_not_met_by_skipped_parts() -> None:
    for parts in (
        {},
        {goal.part: part(end="not run: no time left") for goal in GOALS},
        {goal.part: part(end=-11, output="Fatal Python error") for goal in GOALS},
        {goal.part: {"exit": "cut after 5 s, killed", "seconds": 5.0} for goal in GOALS},
    ):
        rows = check_goals({**HEAD, "parts": parts})
        assert all(row[1] == "—" and row[3].startswith("not measured: ") for row in rows)
        render_page({**HEAD, "parts": parts})


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("step_350m", part(step("kerple_log", 1, 1.0), step("cdape", 1, 1.0), end="cut after 70 s")),
        ("bias", part(kernel("triton", 1.0), kernel("flash", 1.0), end="cut after 45 s")),
        ("memory", part(kernel("triton", 1.0), kernel("triton", 1.0, op=BIAS), end="cut after 35 s")),
    ],
)
def test_the_smaller_size_does_not_represent_the_larger_one(name: str, cut: dict[str, Any]) -> None:
    """Results at a smaller size (B = 1, length 2,048) do not replace missing ones (micro-batch 32, 8,192)."""
    rows = [row for row in check_goals({**HEAD, "parts": {name: cut}}) if row[3] != "not measured: not run"]
    states = [row[3].split(":")[0] for row in rows]
    assert states[-1] == "not measured"
    assert states[0] == ("not measured" if name == "memory" else "met")


@pytest.mark.parametrize("end", [1, -9, "cut after 45 s"])
def test_goals_are_not_met_if_gate_or_tests_ended_early(end: int | str) -> None:
    counts = {"tests": 5, "failures": 0, "errors": 0, "skipped": 0}
    parts = {"correct_cdape": part(kernel("triton", None, None), end=end),
             "tests": {"exit": end, "seconds": 9.0, "counts": counts, "failed": []}}  # fmt: skip
    rows = {row[0]: row[3] for row in check_goals({**HEAD, "parts": parts})}
    assert rows["CDAPE kernels within the gate against float64"].startswith("not measured: 1 of 1 problems")
    assert rows["Kernel tests on the device"].startswith("not measured: 5 passed, 0 failed, 0 skipped so far")


def test_the_page_links_to_further_reading() -> None:
    linked = Path(__file__).parents[2] / "docs/gpu.md"
    assert "[gpu.md](../gpu.md)" in render_page({**HEAD, "parts": {}})
    assert linked.is_file()


def test_first_passes_which_compile_meet_no_goal() -> None:
    first = kernel("appendix", 900.0, None, rounds=1, cut=True)
    parts = {"paper": part(kernel("triton", 4.0), first, end="cut after 60 s")}
    (row,) = [row for row in check_goals({**HEAD, "parts": parts}, VISIT_GOALS) if row[0].startswith("The paper's")]
    assert row[-1] == "not measured: only first passes ran, then cut after 60 s"
