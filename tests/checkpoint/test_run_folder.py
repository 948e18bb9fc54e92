"""One run at a time per folder; locks end with their process; files of other programs are kept."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_runs import tiny_config

from megatron.checkpoint import run_folder
from megatron.checkpoint.run_folder import (
    RESOLVED_CONFIG,
    RunLock,
    check_no_foreign_run_files,
    describe_other_contents,
    get_config_path,
    save_config,
)
from megatron.config.execution import resolve_config
from megatron.config.load import load_config, read_config
from megatron.utils.atomic_io import LOCK
from megatron.utils.errors import UserError

OWN = "# my notes: lr from the paper's appendix\nnum_layers: 1   # small\n"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 0.1)


def test_a_second_run_is_rejected_until_the_first_has_ended(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    with pytest.raises(UserError, match="another run is using this folder"):
        RunLock(tmp_path / "run")
    RunLock(tmp_path / "other").release()
    first.release()
    RunLock(tmp_path / "run").release()


def test_briefly_held_locks_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 60.0)
    first = RunLock(tmp_path)
    threading.Timer(0.3, first.release).start()
    RunLock(tmp_path).release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            RunLock(tmp_path)
            (tmp_path / "held").touch()
            time.sleep(60)
        finally:
            os._exit(1)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(UserError):
        RunLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^save is .*file, which is a file; name a folder$"):
        RunLock(tmp_path / "file")


def test_a_new_run_among_other_files_is_noted(tmp_path: Path) -> None:
    assert describe_other_contents(None) == describe_other_contents(tmp_path / "new") == ()
    for name in ("config.yml", "slurm-17.out", ".hidden"):  # prepared for the run
        (tmp_path / name).touch()
    assert describe_other_contents(tmp_path) == ()
    for name in ("thesis.tex", "a", "b", "c"):
        (tmp_path / name).touch()
    (note,) = describe_other_contents(tmp_path)
    assert (
        note == f"save: {tmp_path} has files that no run wrote (a, b, c and 1 more); the run's files are added to them"
    )
    RunLock(tmp_path).release()
    assert describe_other_contents(tmp_path) == ()


def test_a_user_configuration_keeps_its_name_and_comments(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, train_iters=7)
    own = tmp_path / "config.yml"
    own.write_text(OWN)
    reported = save_config(config, tmp_path)
    assert (reported or "").startswith(f"{own} was not written by a run and is left unchanged")
    assert own.read_text() == OWN
    assert get_config_path(tmp_path) == tmp_path / RESOLVED_CONFIG
    assert read_config(get_config_path(tmp_path)).training.train_iters == 7
    save_config(config.replace(train_iters=9), tmp_path)  # as a resumed run does
    assert own.read_text() == OWN
    assert read_config(get_config_path(tmp_path)).training.train_iters == 9
    own.unlink()
    assert save_config(config, tmp_path) is None
    assert (get_config_path(tmp_path), (tmp_path / RESOLVED_CONFIG).exists()) == (own, False)


def test_a_run_replaces_generated_files_unless_edited(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, train_iters=7)
    own = tmp_path / "config.yml"
    assert save_config(config, tmp_path) is save_config(config.replace(train_iters=9), tmp_path) is None
    assert read_config(own).training.train_iters == 9
    changed = own.read_text() + "# longer, as the reviewers asked\n"
    own.write_text(changed)
    save_config(config, tmp_path)
    assert own.read_text() == changed


def test_a_staged_run_replaces_its_own_configuration_in_any_order_of_keys(tmp_path: Path) -> None:
    stage = (
        "pos_emb_options.base: 50000, train_batch_size: 8, lr_decay_style: linear, lr: 1e-4, seq_length: 32, "
        "optimizer: {params: {betas: [0.9, 0.9]}}"
    )
    keys = ["model/125M", "rotary"], ["min_lr=0", f"stages=[{{until: 2}}, {{{stage}}}]", "train_iters=4", "num_gpus=1"]
    config = resolve_config(load_config(*keys).config, 1).config
    assert save_config(config, tmp_path) is None
    assert read_config(tmp_path / "config.yml") == config
    assert save_config(config.replace(train_iters=9), tmp_path) is None
    assert not (tmp_path / RESOLVED_CONFIG).exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", RESOLVED_CONFIG])
def test_a_folder_with_other_files_is_rejected_for_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine: true\n")
    with pytest.raises(UserError, match=f"save: .* contains {name}, which was not written by a run"):
        check_no_foreign_run_files(tmp_path, ("metrics.jsonl",))
    (tmp_path / LOCK).touch()  # a run killed before its first checkpoint
    check_no_foreign_run_files(tmp_path, ("metrics.jsonl",))
