"""Runs over the two nodes of a SLURM cluster, started as by a user."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_runs import losses, records, tiny_config, write_corpora, write_pausing_method

from megatron.distributed.hardware import LocalHardware
from megatron.launch.local_launcher import train_on_this_machine
from megatron.position.catalog import METHODS_VARIABLE
from megatron.training.resolve_run import resolve_run
from tools.tolerances import compute_tolerance, count_gpt_sums

from .conftest import ROOT, Slurm

ROUNDING = compute_tolerance(*count_gpt_sums(32, layers=2))
SECONDS = 240  # usually about ten seconds: two processes import torch at once, beside other tests


def wait_for(what: Callable[[], bool], run: Path, slurm: Slurm) -> None:
    """Wait until a condition is true, with a timeout."""
    deadline = time.monotonic() + SECONDS
    while not what():
        printed = "".join(path.read_text() for path in run.glob("slurm-*.out"))
        assert time.monotonic() < deadline, f"{printed}\n{slurm.logs()}"
        time.sleep(0.1)


def steps(run: Path) -> int:
    """Return the last step that a run reported."""
    return max(records(run), default=0) if (run / "metrics.jsonl").is_file() else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[float]]]:
    """Corpus with run.yml beside it, and the losses of an undisturbed single process."""
    folder = tmp_path_factory.mktemp("slurm")
    corpus, method = write_corpora(folder / "data"), write_pausing_method(folder / "methods")
    keys = {"pos_emb": method, "train_iters": 24, "train_batch_size": 4, "checkpoint_factor": None, "num_workers": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(METHODS_VARIABLE, str(folder / "methods"))
        config = tiny_config(corpus, folder / "whole", **keys)
        assert train_on_this_machine(resolve_run(config, LocalHardware(0, 1))) == 0
        config = tiny_config(corpus, **keys, train_micro_batch_size_per_gpu=1, num_gpus=None, nodes=None)
        config.save(folder / "run.yml")
        yield folder, losses(folder / "whole")


def test_srun_alone_starts_a_run_over_both_nodes(slurm: Slurm, whole: tuple[Path, list[float]]) -> None:
    folder, expected = whole
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--wait=60", sys.executable, str(ROOT / "deepy.py"), "train"]
    printed = slurm(*command, "run.yml", "save=srun", cwd=folder, timeout=SECONDS)
    assert losses(folder / "srun") == pytest.approx(expected, rel=ROUNDING)
    assert printed.count("2 ranks: tensor 1 × pipeline 1 × context 1 × data 2") == 1  # one rank reports
    assert re.search(r"run\.yml save=srun \(SLURM job \d+\)\n", (folder / "srun" / "log.txt").read_text())


def test_a_submitted_run_survives_two_preemptions(slurm: Slurm, whole: tuple[Path, list[float]]) -> None:
    folder, expected = whole
    run = folder / "job"
    keys = ["save=job", "launcher=slurm", "nodes=2", "num_gpus=1", "slurm.time=0:59:00", "slurm.partition=debug"]
    before = sorted(folder.iterdir())
    script = slurm.deepy("train", "run.yml", *keys, "--dry-run", cwd=folder)
    assert sorted(folder.iterdir()) == before
    output = slurm.deepy("train", "run.yml", *keys, cwd=folder)
    assert (run / "job.sbatch").read_text().splitlines()[2:] == script.splitlines()[2:]  # without the command line
    job = re.match(r"submitted SLURM job (\d+): 2 nodes × 1 process; script job/job.sbatch\n", output)[1]  # type: ignore[index]
    assert f"tail -f job/slurm-{job}.out; stop: scancel {job}" in output

    # As with --signal near the time limit: only the ranks get the signal; they save, and the script requeues its job.
    wait_for(lambda: steps(run) >= 2, run, slurm)
    slurm("scancel", "--signal=TERM", job)
    wait_for(lambda: "stopped by SIGTERM" in (run / f"slurm-{job}.out").read_text(), run, slurm)
    first = steps(run)
    assert first < len(expected)
    # As in a preemption: all processes get the signal, and SLURM itself requeues.
    wait_for(lambda: steps(run) >= first + 2, run, slurm)
    slurm("scontrol", "requeue", job)
    wait_for(lambda: steps(run) == len(expected) and slurm.state(job) == "COMPLETED", run, slurm)

    log = (run / "log.txt").read_text()
    assert "restart 1 (SLURM_RESTART_COUNT)" in log
    assert "restart 2 (SLURM_RESTART_COUNT)" in log
    assert log.count("stopped by SIGTERM") == 2
    assert losses(run) == pytest.approx(expected, rel=ROUNDING)
