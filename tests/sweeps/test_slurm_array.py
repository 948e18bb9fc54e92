"""Sweep as a job array: submitted jobs, work of each task, and a final report from the same command."""

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from farfield import commands
from megatron.checkpoint.compatibility import DEEPSPEED_FOLDER
from megatron.checkpoint.layout import WEIGHTS
from megatron.distributed.process_groups import ProcessGroups
from megatron.launch.slurm import format_array_indices
from megatron.model.build import build_model
from megatron.sweeps import run_sweep as sweeps
from megatron.sweeps.spec import read_sweep
from megatron.training.metrics_log import METRICS_FILE
from megatron.utils.errors import RunError, UserError

from .conftest import BASE, Trainer, run, write

KEYS = ("launcher=slurm", "num_gpus=1", "slurm.cpus_per_task=2", "sweep.seeds=[3,4]")


@pytest.fixture
def sbatch(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacement of sbatch that accepts every job."""
    (place / "bin").mkdir()
    (place / "bin" / "sbatch").write_text("#!/bin/sh\necho 17\n")
    (place / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_each_run_is_a_task_and_the_same_command_reports(
    sbatch: None, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, output = run(*KEYS)
    assert found == []
    assert "submitted SLURM job 17: 1 process; script out/job.sbatch" in output
    assert "4 of 4 runs submitted" in output
    assert trainer.calls() == []
    script = Path("out/job.sbatch").read_text()
    assert {"#SBATCH --array=0-3", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1"} <= set(script.splitlines())
    assert "scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" in script
    (line,) = re.findall(r"^srun .*deepy.py (sweep .*)$", script, re.MULTILINE)
    assert line == "sweep sweep.yml launcher=slurm num_gpus=1 slurm.cpus_per_task=2 'sweep.seeds=[3,4]' " + (
        "--run-index=$SLURM_ARRAY_TASK_ID"
    )

    with monkeypatch.context() as task:
        task.setenv("SLURM_JOB_ID", "17")  # nothing is submitted from within a job
        for member in (0, 2, 3):
            sweeps.run_sweep(["sweep.yml"], KEYS, Console(file=io.StringIO()), member=member)
    assert trainer.calls() == [
        *("rotary 3 None", "evaluate out/rotary/seed_3", "alibi 3 None", "evaluate out/mine/seed_3"),
        *("alibi 4 None", "evaluate out/mine/seed_4"),
    ]
    assert not Path("out/report.html").exists()
    found, output = run(*KEYS)
    assert found == []
    assert "1 of 4 runs submitted" in output
    assert "#SBATCH --array=1\n" in Path("out/job.sbatch").read_text()

    with monkeypatch.context() as task:
        task.setenv("SLURM_JOB_ID", "17")
        sweeps.run_sweep(["sweep.yml"], KEYS, Console(file=io.StringIO()), member=1)
    found, output = run(*KEYS)
    assert len(found) == 8
    assert "nothing to do: 4 of 4 runs are complete" in output
    assert Path("out/report.html").exists()


def test_branches_are_submitted_after_their_checkpoint_exists(sbatch: None, trainer: Trainer) -> None:
    from .test_branches import TRUNK

    write(TRUNK)
    _, output = run("launcher=slurm", "num_gpus=1", "slurm.cpus_per_task=2")
    assert (
        "2 runs wait for other runs, with which they share a training or from whose checkpoints they branch; run the "
        "same command again once these have ended" in output
    )
    assert "1 of 3 runs submitted" in output
    trunk, *_ = read_sweep(["sweep.yml"]).members
    (trainer.save(trunk.resolved_config, trunk.folder, 3) / DEEPSPEED_FOLDER).mkdir()  # optimizer states
    _, output = run("launcher=slurm", "num_gpus=1", "slurm.cpus_per_task=2")
    assert "1 run waits for other runs" in output
    assert "#SBATCH --array=0-1\n" in Path("out/job.sbatch").read_text()


def test_one_task_trains_a_run_that_variants_share(sbatch: None, trainer: Trainer) -> None:
    """Two tasks would train in the same folder; after the training both can evaluate it."""
    keys = (*KEYS, "sweep.runs=pool")
    write(BASE.replace("mine: {", "same: {pos_emb: rotary}\n        mine: {"))
    _, output = run(*keys)
    assert "2 runs wait for other runs, with which they share a training" in output
    assert "4 of 6 runs submitted" in output
    assert "#SBATCH --array=0-1,4-5\n" in Path("out/job.sbatch").read_text()
    for member in read_sweep(["sweep.yml"], keys).members[:2]:
        trainer.save(member.resolved_config, member.folder, 6)
    _, output = run(*keys)
    assert "wait" not in output
    assert "#SBATCH --array=0-5\n" in Path("out/job.sbatch").read_text()


def test_a_task_depends_on_no_other_run(sbatch: None, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run may have failed, or be replacing its checkpoints."""
    run(*KEYS)
    first, other, *_ = read_sweep(["sweep.yml"], KEYS).members
    (trainer.save(other.resolved_config, other.folder, 3) / WEIGHTS).unlink()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = sweeps.run_sweep(["sweep.yml"], KEYS, Console(file=io.StringIO()), member=0)
    assert {record.method for record in found} == {first.variant}
    with pytest.raises(RunError, match="all checkpoints are damaged"):
        sweeps.run_sweep(["sweep.yml"], KEYS, Console(file=io.StringIO()), member=1)


def test_python_gets_no_records_of_submitted_runs(
    sbatch: None, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "run_command", lambda *_, **__: run(*KEYS))
    keys = {"launcher": "slurm", "num_gpus": 1, "slurm.cpus_per_task": 2, "sweep.seeds": [3, 4]}
    assert commands.sweep("sweep.yml", **keys) == []
    assert Path("out/job.sbatch").exists()


def test_a_dry_run_prints_the_script_and_makes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    sweeps.run_sweep(["sweep.yml"], KEYS, dry_run=True)
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert sorted(place.rglob("*")) == before


def test_a_local_dry_run_lists_the_runs_and_makes_nothing(sbatch: None, place: Path, trainer: Trainer) -> None:
    before, out = sorted(place.rglob("*")), io.StringIO()
    sweeps.run_sweep(["sweep.yml"], console=Console(file=out, width=200), dry_run=True)
    assert sorted(place.rglob("*")) == before
    assert out.getvalue().startswith("note: the data are not checked, because the sweep first prepares the corpus corp")
    run(*KEYS)
    first, *others = read_sweep(["sweep.yml"]).members
    trainer.save(first.resolved_config, first.folder, 2)
    before, out = sorted(place.rglob("*")), io.StringIO()
    assert sweeps.run_sweep(["sweep.yml"], console=Console(file=out, width=200), dry_run=True) == []
    assert sorted(place.rglob("*")) == before
    *_, counted = lines = out.getvalue().splitlines()
    assert f"{first.name}: has a checkpoint of step 2 of 6" in lines
    assert {f"{member.name}: new" for member in others} <= set(lines)
    counts = "2 of 2 runs to train or evaluate"
    unknown = "training time unknown, because no run has recorded its speed yet"
    assert counted == f"{counts} ({unknown}); nothing was started"
    record = {"kind": "train", "step": 2, "ms_per_step": 1000 * 3600.0, "memory_gib": 1.0}
    (first.folder / METRICS_FILE).write_text(json.dumps(record) + "\n")
    out = io.StringIO()
    sweeps.run_sweep(["sweep.yml"], console=Console(file=out, width=200), dry_run=True)
    models = [
        build_model(m.config.model, m.config.position, 1, seed=0, groups=ProcessGroups()) for m in (first, *others)
    ]
    rotary, mine = (model.count_flops_per_token(16) for model in models)
    time = f"about {4 + 6 * mine / rotary:.0f} h of training one after another, at recorded speeds"
    assert out.getvalue().splitlines()[-1] == f"{counts} ({time}); nothing was started"
    with pytest.raises(UserError, match="no dataset nowhere"):
        sweeps.run_sweep(["sweep.yml"], ["sweep.corpus=null", "train_data_paths=[nowhere]"], dry_run=True)


def test_invalid_tasks_are_rejected_before_the_queue(sbatch: None, trainer: Trainer) -> None:
    write(BASE.replace("{pos_emb: rotary}", "{pos_emb: learned, eval_lengths: [4x]}"))
    with pytest.raises(UserError, match=r"^sweep.variants.rotary: eval_lengths: 4x is 64 tokens"):
        run(*KEYS)
    with pytest.raises(UserError, match=r"^slurm.container: no such image: nowhere.sif$"):
        run(*KEYS, "slurm.container=nowhere.sif")
    assert not Path("out/job.sbatch").exists()
    assert trainer.calls() == []
    with pytest.raises(UserError, match=r"^sweep.variants.rotary: train_data_paths: no dataset nowhere"):
        sweeps.run_sweep(["sweep.yml"], [*KEYS, "sweep.corpus=null", "train_data_paths=[nowhere]"], dry_run=True)


def test_invalid_job_arrays_are_rejected(place: Path) -> None:
    with pytest.raises(UserError, match="nodes is 2, but each run of a sweep uses one node"):
        run(*KEYS, "nodes=2")
    with pytest.raises(UserError, match="--run-index is 4, but the sweep has 4 runs, counted from 0"):
        sweeps.run_sweep(["sweep.yml"], KEYS, member=4)
    write(BASE.replace("{pos_emb: rotary}", "{pos_emb: rotary, slurm: {partition: big}}"))
    with pytest.raises(UserError, match="all variants of a sweep must have the same processes, devices and slurm keys"):
        run(*KEYS)
    assert not Path("out").exists()


def test_array_indices_are_abbreviated() -> None:
    assert format_array_indices([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert format_array_indices([3]) == "3"
