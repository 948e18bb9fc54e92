"""Complete rehearsals of small runs: their reports and their files."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from documented import list_commands

from megatron.config.load import load_config
from megatron.rehearsal.null_device.environment import get_gpu_model
from megatron.rehearsal.rehearse import Rehearsal, rehearse
from megatron.rehearsal.rehearsed_run import plan_rehearsal
from megatron.rehearsal.report import RehearsalReport
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[2]
SMALL = ("num_layers=2", "hidden_size=128", "num_attention_heads=2", "seq_length=256", "train_batch_size=8",
         "train_micro_batch_size_per_gpu=2")  # fmt: skip


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def run_small(*keys: str, gpus: int, gib: float | None = None, **options: object) -> RehearsalReport:
    config = load_config(["125M", "kerple_log"], [*SMALL, *keys]).config
    gpu = get_gpu_model("h100")
    gpu = gpu if gib is None else replace(gpu, memory=int(gib * 2**30))
    run = plan_rehearsal(config, gpus, None, vocab_size=1000)
    rehearsal: Rehearsal = rehearse(run, gpu, "roles", **options)  # type: ignore[arg-type]
    return RehearsalReport(rehearsal, network_gb_per_s=25, mfu=0.45)


def test_a_run_over_tensor_and_pipeline_ranks_from_files_to_a_resume(tmp_path: Path) -> None:
    keys = ("precision=bf16", "zero_optimization={stage: 1}", "model_parallel_size=2", "pipe_parallel_size=2",
            f"save={tmp_path / 'runs' / 'a'}", "eval_interval=10")  # fmt: skip
    report = run_small(*keys, gpus=4)
    result = report.to_dict()
    assert result["verdict"] == "fits", result["roles"]
    assert result["exit_code"] == 0
    assert result["mismatches"] == []
    assert result["distinct_sequences"] == 2, "one for each stage"
    assert [role["rank"] for role in result["roles"]] == [0, 1, 2, 3]
    for role in result["roles"]:
        assert {"forward and backward", "step", "validate", "save"} <= set(role["peaks"]["train"])
        assert role["planned"] is not None
        assert 0 < role["peak_allocated"] <= role["peak_reserved"]
        operations = {row["operation"] for row in role["collectives"]}
        assert {"send", "recv", "all_reduce"} <= operations
    parameters = next(iter(report.rehearsal.train_traces.values())).result.parameters or 0
    assert result["disk"]["weights"] > 4 * parameters
    assert result["disk"]["states"] > 8 * parameters
    assert set(report.rehearsal.resume_traces) == {0, 1, 2, 3}
    assert not (tmp_path / "runs").exists(), "the user's folder is not touched"
    assert not list(tmp_path.glob("farfield-*"))


def test_a_rank_that_skips_a_sum_is_named_with_its_group_and_line() -> None:
    command = (sys.executable, str(ROOT / "tests" / "support" / "faulty_rank.py"))
    report = run_small("precision=fp32", "model_parallel_size=2", gpus=2, command=command)
    assert report.exit_code == 1
    assert report.verdict == "fits", "each rank by itself is well"
    (action, found), *_ = report.rehearsal.mismatches
    assert (action, found.communicator.ranks) == ("train", (0, 1))
    assert "all_reduce" in found.message
    assert "rank 0" in found.message or "rank 1" in found.message
    assert not report.rehearsal.resume_traces


def test_out_of_memory_names_the_operation() -> None:
    report = run_small("precision=fp32", "train_micro_batch_size_per_gpu=8", gpus=1, gib=0.1)
    assert (report.verdict, report.exit_code) == ("out of memory", 1)
    ((action, rank, error),) = report.rehearsal.find_errors()
    assert (action, rank, error.kind) == ("train", 0, "memory")
    assert "CUDA out of memory. Tried to allocate" in error.message
    assert error.where, "a line of ours"
    json.dumps(report.to_dict())


def test_an_interrupted_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "deepy.py", "rehearse", "125M", "kerple_log", *SMALL, "--gpus", "1", "--gpu", "h100"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("train: rank 0"):
            break
    while not list(tmp_path.glob("farfield-rehearsal-*/*.out")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "interrupted"
    assert not list(tmp_path.glob("farfield-rehearsal-*"))
    names = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert names == "", "no rank is left"


def test_the_guide_to_clusters_rehearses(tmp_path: Path) -> None:
    """The guide's command runs with a cluster's file, on a smaller model and fewer GPUs."""
    page = (ROOT / "docs" / "on_your_cluster.md").read_text(encoding="utf-8")
    (words,) = (words[1:] for words in list_commands(page) if words[1] == "rehearse")
    cluster = (ROOT / "configs" / "cluster" / "slurm_a100.yml").read_text(encoding="utf-8")
    (tmp_path / "mine.yml").write_text(cluster, encoding="utf-8")
    words[words.index("--gpus") + 1] = "4"
    done = subprocess.run(
        [sys.executable, ROOT / "deepy.py", *words, *SMALL], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_errors_match_those_of_the_run() -> None:
    with pytest.raises(UserError, match="does not divide the 3 processes"):
        run_small("model_parallel_size=2", gpus=3)
