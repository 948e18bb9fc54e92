"""Runs on this machine: remaining files, and the path of the log."""

import json
import os
import socket
import threading
import warnings
from pathlib import Path

import pytest

from megatron.checkpoint import run_folder
from megatron.config.execution import ResolvedRun
from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import LaunchContext, RankInfo
from megatron.launch import dispatch, local_launcher, worker
from megatron.training.resolve_run import resolve_run
from megatron.utils.console import UnexpectedError
from megatron.utils.errors import FarfieldWarning, RunError, UserError

SMALL = [
    *("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=2"),
    *("train_data_paths=[nowhere]", "train_batch_size=8", "train_micro_batch_size_per_gpu=2"),
]


def settled(*overrides: str) -> ResolvedRun:
    return resolve_run(load_config([], [*SMALL, *overrides]).config, LocalHardware(num_gpus=0, num_cores=2))


@pytest.fixture
def fake_run(monkeypatch):
    """Function that replaces training by a function of the log."""

    def _fake(body):
        monkeypatch.setattr(worker, "run_rank", lambda config, log, rank_info, hooks: body(log))

    return _fake


def raising(error: Exception):
    def body(log: Path) -> int:
        raise error

    return body


def test_gpus_are_hidden_from_a_run_on_the_cpu(fake_run, monkeypatch):
    """PyTorch would otherwise create a context on each of them, beside the runs of others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    seen = []
    fake_run(lambda log: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or 0)
    local_launcher.train_on_this_machine(settled("device=cpu"))
    assert (seen, os.environ["CUDA_VISIBLE_DEVICES"]) == ([""], "3,4")


def test_rejected_commands_leave_no_folder(fake_run, tmp_path):
    fake_run(raising(UserError("no such data")))
    with pytest.raises(UserError, match="no such data"):
        local_launcher.train_on_this_machine(settled(f"save={tmp_path / 'runs' / 'a'}"))
    assert list(tmp_path.iterdir()) == []


def test_rejection_keeps_the_files_of_a_run_that_started_at_the_same_time(fake_run, tmp_path):
    """The other run created its lock after this one had found a new folder, and has written nothing else yet."""
    folder, locks = tmp_path / "a", []

    def body(log: Path) -> int:
        locks.append(run_folder.RunLock(folder))
        raise UserError(run_folder.BUSY)

    fake_run(body)
    with pytest.raises(UserError, match="another run is using this folder"):
        local_launcher.train_on_this_machine(settled(f"save={folder}"))
    locks[0].check_folder()
    assert (folder / local_launcher.LOG_FILE).is_file()
    locks[0].release()


def test_rejection_keeps_an_existing_folder(fake_run, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.txt").write_text("an earlier run\n")
    fake_run(raising(UserError("no")))
    with pytest.raises(UserError):
        local_launcher.train_on_this_machine(settled(f"save={tmp_path / 'a'}"))
    assert (tmp_path / "a" / "log.txt").read_text().startswith("an earlier run\n")


@pytest.mark.parametrize(
    ("beat", "is_waited_for"),
    [
        ({"host": socket.gethostname(), "process": os.getpid()}, False),
        ({"host": socket.gethostname(), "process": 2**22 + 1}, True),  # no process has this ID
        ({"host": "another", "process": os.getpid()}, True),
        ([], True),
        (None, True),
    ],
)
def test_a_folder_in_use_is_rejected_before_a_rank_begins(fake_run, tmp_path, monkeypatch, beat, is_waited_for):
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 0.1)
    fake_run(raising(AssertionError("it began")))
    held = run_folder.RunLock(tmp_path)
    if beat is not None:
        (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        with pytest.raises(UserError, match=rf"^save: {tmp_path}: another run is using this folder"):
            local_launcher.train_on_this_machine(settled(f"save={tmp_path}"))
    held.release()
    assert bool(reported) == is_waited_for
    assert not (tmp_path / "log.txt").exists()


def test_a_released_folder_is_used_again(fake_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 60.0)
    fake_run(lambda log: 0)
    held = run_folder.RunLock(tmp_path)
    threading.Timer(0.3, held.release).start()
    with pytest.warns(
        FarfieldWarning, match=rf"save: {tmp_path}: another run is starting or ending there; waiting 60 s"
    ):
        assert local_launcher.train_on_this_machine(settled(f"save={tmp_path}")) == 0


def test_failure_keeps_the_log(fake_run, tmp_path):
    fake_run(raising(RunError("loss is NaN")))
    with pytest.raises(RunError, match="NaN"):
        local_launcher.train_on_this_machine(settled(f"save={tmp_path / 'a'}"))
    assert (tmp_path / "a" / "log.txt").exists()


def test_without_a_run_folder_the_log_is_temporary(fake_run):
    logs = []
    fake_run(lambda log: logs.append(log) or 0)
    assert local_launcher.train_on_this_machine(settled()) == 0
    fake_run(lambda log: logs.append(log) or raising(UnexpectedError("bug"))(log))
    with pytest.raises(UnexpectedError):
        local_launcher.train_on_this_machine(settled())
    assert not logs[0].exists()
    assert logs[1].exists()
    logs[1].unlink()


def test_an_unwritable_folder_is_reported(fake_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="which is a file"):
        local_launcher.train_on_this_machine(settled(f"save={tmp_path / 'file'}"))
    with pytest.raises(UserError, match=r"save is .*/file/inside, but .*/file is a file; name a folder"):
        local_launcher.train_on_this_machine(settled(f"save={tmp_path / 'file' / 'inside'}"))
    for place in ("/proc/x", "/proc", f"{tmp_path}/new/{'long' * 100}"):  # fail for root too
        with pytest.raises(
            UserError, match=rf"^save is {place}, which cannot be written to \(.+\); name another folder$"
        ):
            local_launcher.train_on_this_machine(settled(f"save={place}"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_rank_runs_in_this_process_with_its_environment(fake_run, monkeypatch):
    import os

    monkeypatch.delenv("RANK", raising=False)
    seen = {}
    fake_run(lambda log: seen.update(os.environ) or 130)
    assert local_launcher.train_on_this_machine(settled("master_port=2345")) == 130
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MASTER_PORT"]) == ("0", "1", "2345")
    assert "RANK" not in os.environ


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_of_another_launcher_trains_in_this_process(fake_run, monkeypatch, tmp_path, rank):
    import os

    seen = {}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        local_launcher.worker,
        "run_rank",
        lambda config, log, rank_info, hooks: seen.update(os.environ, rank=rank_info.rank) or 143,
    )
    started = LaunchContext(RankInfo(rank, 8, rank % 4, 4), "gpu08", 2345, 2345, cores=3)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert local_launcher.train_on_this_machine(settled(f"save={tmp_path / 'a'}"), started) == 143
    assert seen["rank"] == rank
    assert seen.items() >= started.to_environment().items()
    assert seen["OMP_NUM_THREADS"] == "3"
    head = (tmp_path / "a" / "log.txt").read_text()
    assert head.endswith("(SLURM job 17, restart 1 (SLURM_RESTART_COUNT))\n") if rank == 0 else head == ""


@pytest.mark.parametrize(
    ("place", "error", "reported"),
    [
        (None, UserError("no"), "no"),
        (RankInfo(0, 8, 0, 4), UserError("no"), "no"),
        (RankInfo(4, 8, 0, 4), UserError("no"), "no"),
        (RankInfo(5, 8, 1, 4), UserError("no"), None),
        (RankInfo(0, 8, 0, 4), RunError("full"), "full"),
        (RankInfo(5, 8, 1, 4), RunError("full"), "rank 5: full"),
    ],
)
def test_common_errors_are_reported_by_one_rank_per_machine(place, error, reported):
    started = None if place is None else LaunchContext(place, "gpu08", 2345, 2345, cores=None)
    with (
        pytest.raises(SystemExit if reported is None else type(error)) as caught,
        dispatch.report_errors_once(started),
    ):
        raise error
    assert caught.value.code == 2 if reported is None else str(caught.value) == reported
