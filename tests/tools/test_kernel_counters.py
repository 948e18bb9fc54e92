"""Hardware counters and rates of instructions: what they read from ncu, and what they say without it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch

from tools.bench import instruction_rates, kernel_counters
from tools.bench.kernel_counters import read_counters, summarize_kernel

PROBLEM = {"op": "cdape", "batch": 2, "heads": 16, "length": 4, "dim": 64, "width": 32, "dtype": "bfloat16"}
LONG = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","_fwd(float, int)","gpu__time_duration.sum","ns","2,048"
"0","1","_fwd(float, int)","smsp__inst_issued.sum","inst","800"
"1","1","_bwd","gpu__time_duration.sum","ns","4,096"
"1","1","_bwd","smsp__inst_issued.sum","inst","n/a"
"1","1","_bwd","smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio","","1.25"
"""
WIDE = """"ID","Kernel Name","gpu__time_duration.sum","smsp__inst_issued.sum"
"","","ns","inst"
"0","_fwd(float, int)","2,048","800"
"1","_bwd","4,096","40"
"""
NCU = """#!/bin/sh
case "$*" in
*{known}*) ;;
*) echo "==ERROR== Failed to find metric regex:{unknown}"; exit 1;;
esac
cat <<'END'
{text}
END
"""


@pytest.fixture
def run_with_ncu(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str, str], list[dict[str, Any]]]:
    """Function that counts with a program that prints a text if its arguments contain a word."""

    def run(text: str, known: str = "") -> list[dict[str, Any]]:
        (tmp_path / "ncu").write_text(NCU.format(known=known, unknown="sm__x", text=text))
        (tmp_path / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        words = (
            "--op",
            "cdape",
            "--batch",
            "2",
            "--length",
            "4",
            "--device",
            "cpu",
            "--json",
            str(tmp_path / "a.json"),
        )
        assert not command(kernel_counters, *words)
        return json.loads((tmp_path / "a.json").read_text())["records"]

    return run


def test_both_forms_of_output_have_the_same_kernels() -> None:
    for text, issued in ((LONG, None), (WIDE, 40.0)):
        first, second = read_counters(text)
        assert first == {"kernel": "_fwd(float, int)", "ns": 2048.0, "issued": 800.0}
        assert (second["kernel"], second["ns"], second.get("issued")) == ("_bwd", 4096.0, issued)
        assert second.get("stalls") == ({"no_instruction": 1.25} if text == LONG else None)


def test_counts_are_given_per_causal_score_position() -> None:
    kernel = {"kernel": "k", "issued": 800.0, "load_store": 60.0, "bytes": 400.0, "l2_bytes": 1400.0}
    found = summarize_kernel(kernel, PROBLEM)  # 2 sequences of 4 · 5 / 2 positions, four schedulers
    assert (found["issued_clocks"], found["load_store_clocks"], found["bytes_per_position"]) == (10.0, 3.0, 20.0)
    assert found["l2_bytes_per_position"] == 70.0
    assert "shared_wavefronts_clocks" not in found


def test_kernels_are_recorded(run_with_ncu: Callable[..., list[dict[str, Any]]]) -> None:
    first, second = run_with_ncu(LONG)
    assert (first["op"], first["peer"], first["B"], first["issued_clocks"]) == ("counters", "cdape", 2, 10.0)
    assert second["ns"] == 4096.0


def test_an_unknown_counter_leaves_the_others(run_with_ncu: Callable[..., list[dict[str, Any]]]) -> None:
    for known in (kernel_counters.METRICS, kernel_counters.FEWER_METRICS):
        assert len(run_with_ncu(LONG, known=f'"--metrics {",".join(known)} "')) == 2
    (record,) = run_with_ncu(LONG, known="no_such_word")
    assert "Failed to find metric" in record["refusal"]


@pytest.mark.parametrize("text", ["==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", ""])
def test_counters_that_are_not_permitted_are_one_line(
    text: str, run_with_ncu: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = run_with_ncu(text)
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert record["refusal"] in output
    assert ("permits counters" in output) == bool(text)


def test_a_hanging_ncu_ends_with_all_it_started_and_keeps_earlier_counts(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first operator's kernels are recorded; the second one's process is killed at its time limit."""
    hang = f"sleep 600 & echo $! > '{tmp_path}/child'; wait"
    script = f"#!/bin/sh\ncase \"$FARFIELD_COUNTED_PROBLEM\" in\n*biased*) {hang};;\nesac\ncat <<'END'\n{LONG}END\n"
    (tmp_path / "ncu").write_text(script)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(kernel_counters, "find_ncu", lambda: str(tmp_path / "ncu"))
    words = ("--batch", "2", "--length", "4", "--device", "cpu", "--seconds", "1", "--json", str(tmp_path / "a.json"))
    written: list[int] = []
    write_record = kernel_counters.write_record
    monkeypatch.setattr(
        kernel_counters,
        "write_record",
        lambda path, result: (written.append(len(result["records"])), write_record(path, result)),
    )
    assert not command(kernel_counters, *words)
    records = json.loads((tmp_path / "a.json").read_text())["records"]
    assert [record["peer"] for record in records] == ["cdape", "cdape", "biased_attention"]
    assert records[-1]["refusal"] == "ncu: TimeoutExpired after at most 1 s"
    assert written == [2, 3]
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "cmdline"
    for _ in range(500):  # ended, or a zombie
        if not child.exists() or not child.read_bytes():
            return
        time.sleep(0.01)
    pytest.fail("the counted process is left")


def test_ncu_leaves_the_clocks_of_the_gpu_as_they_are(run_with_ncu: Callable[..., list[dict[str, Any]]]) -> None:
    assert len(run_with_ncu(LONG, known="--clock-control?none")) == 2


def test_rates_measured_before_an_interruption_are_kept(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(instruction: str, warps: int) -> dict[str, Any]:
        if instruction == "TRANSPOSE":
            raise KeyboardInterrupt
        return {"op": "instruction_rate", "peer": instruction, "warps": warps, "clocks": 2.0}

    with fake_gpu.fake_gpu():
        monkeypatch.setattr(instruction_rates, "measure_rate", measure)
        with pytest.raises(KeyboardInterrupt):
            command(instruction_rates, "--device", "cuda", "--json", str(tmp_path / "a.json"))
    records = json.loads((tmp_path / "a.json").read_text())["records"]
    assert [record["warps"] for record in records] == list(instruction_rates.WARPS)


def test_without_ncu_it_says_so(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_counters, "find_ncu", lambda: None)
    assert not command(kernel_counters, "--device", "cpu")
    assert capsys.readouterr().out.count("is not installed") == len(kernel_counters.OPS)


def test_sizes_of_the_rates_are_those_of_the_header(command: Callable[..., Any]) -> None:
    header = (instruction_rates.FOLDER / "instruction_rates.h").read_text(encoding="utf-8")
    assert f"CHAINS = {instruction_rates.CHAINS}, REPEATS = {instruction_rates.REPEATS}" in header
    assert f"MEMORY_BYTES = {instruction_rates.MEMORY_BYTES}" in header
    assert f"enum Instruction {{ {', '.join(instruction_rates.INSTRUCTIONS)} }};" in header
    if not torch.cuda.is_available():
        assert not command(instruction_rates)
