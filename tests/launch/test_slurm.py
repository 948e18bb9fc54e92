"""Batch script: its resource requests, and its behavior with replacements of SLURM's commands.

tests/cluster submits a script to a real SLURM.
"""

import os
import subprocess
from pathlib import Path

import pytest

from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.launch import slurm
from megatron.training.check_start import check_run_folder
from megatron.utils.errors import RunError, UserError
from megatron.utils.project import PACKAGES_FOLDER

SMALL = [
    *("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=2"),
    *("train_data_paths=[nowhere]", "train_batch_size=32", "launcher=slurm", "num_gpus=4"),
]


def job_config(*overrides: str) -> Config:
    return load_config([], [*SMALL, *overrides]).config


def job(*overrides: str) -> slurm.SlurmJob:
    return slurm.build_training_job(job_config(*overrides))


def options(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replacements of SLURM's commands; each writes its arguments to NAME.txt and exits with a given code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def add(name: str, code: int = 0, printed: str = "", complained: str = "") -> None:
        path = tmp_path / "bin" / name
        words = f'echo "$@" >> {tmp_path}/{name}.txt; echo -n "{printed}"; echo -n "{complained}" >&2; exit {code}'
        path.write_text(f"#!/bin/sh\n{words}\n")
        path.chmod(0o755)

    return add


def run(script: str, **environment: str) -> int:
    return subprocess.run(["bash", "-c", script], env={**os.environ, **environment}, check=False).returncode


def test_unset_keys_use_the_clusters_default() -> None:
    text = slurm.render_batch_script(job("save=runs/a", "nodes=2"))
    assert options(text) == {
        *("--job-name=a", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--requeue", "--signal=TERM@300"),
        *("--output=runs/a/slurm-%j.out", "--open-mode=append"),
    }


def test_every_key_reaches_sbatch() -> None:
    text = slurm.render_batch_script(
        job(
            *("save=runs/a", "slurm.partition=gpu", "slurm.account=ab12", "slurm.qos=long", "slurm.time=2-12"),
            *("slurm.constraint=nvlink", "slurm.gpu_type=a100", "slurm.cpus_per_task=8", "slurm.mem=480G"),
            *("slurm.exclusive=true", "slurm.signal_seconds=60", "slurm.options=[--mail-type=END]"),
            "slurm.setup=[module load cuda]",
        )
    )
    assert options(text) >= {
        *("--partition=gpu", "--account=ab12", "--qos=long", "--time=2-12", "--constraint=nvlink", "--mem=480G"),
        *("--gpus-per-node=a100:4", "--cpus-per-task=8", "--exclusive", "--signal=TERM@60", "--mail-type=END"),
    }
    assert "\nmodule load cuda\n" in text
    assert " --cpus-per-task=8 " in text[text.index("\nsrun ") :]  # srun does not inherit it from sbatch


def test_processes_on_cpus_ask_for_no_gpu() -> None:
    assert not any(
        option.startswith("--gpus") for option in options(slurm.render_batch_script(job("save=a", "device=cpu")))
    )


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("apptainer", "apptainer exec --nv --bind=/scratch --bind=/a:/b image.sif python3 "),
        ("pyxis", "--container-image=image.sif --container-mounts=/scratch:/scratch,/a:/b --container-workdir="),
    ],
)
def test_a_container_has_its_own_python(runtime: str, words: str) -> None:
    keys = [
        "slurm.container=image.sif",
        f"slurm.container_runtime={runtime}",
        "slurm.container_mounts=[/scratch,/a:/b]",
    ]
    line = next(
        line for line in slurm.render_batch_script(job("save=a", *keys)).splitlines() if line.startswith("srun ")
    )
    assert words in line
    assert line.endswith(f"python3 {PACKAGES_FOLDER}/deepy.py train a/job.yml")


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, False), (2, False), (75, True), (143, True), (137, False)]
)
def test_a_stopped_job_returns_to_the_queue(commands, tmp_path, code, requeued) -> None:
    commands("srun", code)
    commands("scontrol")
    assert run(slurm.render_batch_script(job("save=a")), SLURM_JOB_ID="17") == code
    assert (tmp_path / "scontrol.txt").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 17\n"
    (tmp_path / "scontrol.txt").unlink(missing_ok=True)
    assert run(slurm.render_batch_script(job("save=a", "slurm.requeue=false")), SLURM_JOB_ID="17") == code
    assert not (tmp_path / "scontrol.txt").exists()


def test_a_self_resuming_run_needs_no_options_when_requeued() -> None:
    for keys in ([], ["load=a"]):
        made = job("save=a", *keys)
        assert made.requeue == ()
        assert "load: a\n" in dict(made.files)[slurm.CONFIGURATION]


def test_invalid_jobs_are_rejected_before_the_queue(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_run_folder(job_config("save=a"))
    check_run_folder(job_config("save=a", "load=./a"))  # starts at step 0
    with pytest.raises(UserError, match="b: no such folder"):
        check_run_folder(job_config("save=a", "load=b"))
    (tmp_path / "a/checkpoints/step_0000004").mkdir(parents=True)
    with pytest.raises(UserError, match=r"a already contains checkpoints \(newest: step_0000004\); add load=a"):
        check_run_folder(job_config("save=a"))
    check_run_folder(job_config("save=a", "load=a"))


@pytest.mark.parametrize(
    "keys",
    [["load=b", "finetune=true"], ["load=a", "finetune=true"], ["load=a/checkpoints/step_4", "rollback=true"]],
)
def test_a_requeued_run_does_not_restart_from_its_first_start(commands, tmp_path, keys) -> None:
    """A requeued run resumes from its own checkpoints if there are any; otherwise it starts as configured."""
    commands("srun")
    text = slurm.render_batch_script(job("save=a", *keys))
    for restarts, saved, again in (("0", True, False), ("1", False, False), ("1", True, True)):
        if saved:
            (tmp_path / "a" / "checkpoints" / "step_0000004").mkdir(parents=True, exist_ok=True)
        (tmp_path / "srun.txt").unlink(missing_ok=True)
        assert run(text, SLURM_RESTART_COUNT=restarts) == 0
        command = (tmp_path / "srun.txt").read_text()
        assert command.endswith("train a/job.yml load=a finetune=false rollback=false\n" if again else "a/job.yml\n")
        if saved:
            (tmp_path / "a" / "checkpoints" / "step_0000004").rmdir()


def test_a_job_is_submitted_and_a_rejected_one_leaves_no_files(commands, tmp_path) -> None:
    commands("sbatch", printed="17;cluster")
    made = job("save=runs/a b", "nodes=2")
    assert slurm.submit_job(made) == "17"
    assert (tmp_path / "sbatch.txt").read_text() == "--parsable runs/a b/job.sbatch\n"
    assert sorted(path.name for path in (tmp_path / "runs/a b").iterdir()) == ["job.sbatch", "job.yml"]
    assert slurm.describe_submission(made, "17") == [
        "submitted SLURM job 17: 2 nodes × 4 processes; script 'runs/a b'/job.sbatch",
        "queue: squeue -j 17; log, once it runs: tail -f 'runs/a b'/slurm-17.out; stop: scancel 17",
    ]
    commands("sbatch", 1, complained="sbatch: error: invalid partition specified: gpu")
    there = (tmp_path / "runs/a b/job.yml").read_text()
    with pytest.raises(RunError, match=r"^invalid partition specified: gpu$"):
        slurm.submit_job(job("save=runs/a b", "seed=3"))
    with pytest.raises(RunError):
        slurm.submit_job(job("save=elsewhere/b"))
    assert (tmp_path / "runs/a b/job.yml").read_text() == there
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["job.sbatch", "job.yml"])
def test_user_scripts_are_not_overwritten(commands, tmp_path, name: str) -> None:
    commands("sbatch", printed="17")
    own = tmp_path / "runs/a" / name
    own.parent.mkdir(parents=True)
    own.write_text("# my own")
    with pytest.raises(UserError, match=f"save: runs/a/{name} exists and was not written by an earlier submission"):
        slurm.submit_job(job("save=runs/a"))
    assert (own.read_text(), [path.name for path in own.parent.iterdir()]) == ("# my own", [name])
    own.unlink()
    assert slurm.submit_job(job("save=runs/a")) == slurm.submit_job(job("save=runs/a", "seed=3")) == "17"


def test_without_sbatch_or_a_folder_there_is_no_job(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="launcher slurm: sbatch not found; submit on a login node"):
        slurm.submit_job(job("save=a"))
    with pytest.raises(UserError, match="launcher slurm requires save, the run's folder"):
        job()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["num_gpus=null"], "command line: launcher slurm needs num_gpus, the number of processes and GPUs per node"),
        (["slurm.time=0:05:00"], r"slurm.signal_seconds 300 is not less than slurm.time 0:05:00 \(300 s\)"),
        (["slurm.time=tomorrow"], "slurm.time"),
        (["slurm.partition='a b'"], "slurm.partition"),
        (["slurm.container_mounts=[/a]"], "slurm.container_mounts needs slurm.container"),
        (["slurm.partitoin=a"], "did you mean slurm.partition"),
    ],
)
def test_invalid_values_are_rejected_with_their_line(keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config([], [*SMALL, *keys])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:10", 1810), ("24:00:00", 86400), ("2-12", 216000), ("1-00:30", 88200), ("1-1:1:1", 90061)],
)
def test_slurm_time_formats(text: str, seconds: int) -> None:
    """Time formats of sbatch's manual: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
    time = f"slurm.time='{text}'"
    assert load_config([], [*SMALL, time]).config.launch.slurm.get_time_limit_seconds() == seconds
