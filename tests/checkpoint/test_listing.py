"""`./deepy.py checkpoints`: list, verify and delete."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import records

from megatron.checkpoint import layout
from megatron.checkpoint.run_folder import RunLock
from megatron.launch import run_status
from megatron.utils.errors import UserError


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_each_bad_step_is_reported_with_loss_and_reason(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = "states/rank_00000.safetensors"
    flip(run / "checkpoints" / layout.format_checkpoint_name(2) / states)
    (run / "checkpoints" / layout.format_checkpoint_name(4) / "progress.json").unlink()
    run_status.print_checkpoints(run, verify=False, as_json=True)
    two, four = json.loads(capsys.readouterr().out)
    assert (two["step"], four["step"]) == (2, 4)
    assert two["loss"] == records(run)[2]["loss"]
    assert two["bytes"] == sum(file.stat().st_size for file in Path(two["path"]).rglob("*") if file.is_file())
    assert (two["problem"], four["problem"]) == (None, "progress.json is missing")
    monkeypatch.setenv("COLUMNS", "300")
    run_status.print_checkpoints(run / "checkpoints", verify=True, as_json=False)
    shown = capsys.readouterr().out
    assert "changed since it was written" in shown
    assert "progress.json is missing" in shown


def test_folders_without_a_run_are_reported(run: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "this folder has no checkpoint but contains runs that do"),
        (run / "checkpoints" / layout.format_checkpoint_name(2), "is a checkpoint; it must be the run's folder"),
    ):
        with pytest.raises(UserError, match=message):
            run_status.print_checkpoints(path, verify=False, as_json=False)


def test_the_newest_and_the_milestones_stay(run: Path) -> None:
    output: list[str] = []
    config = run / "config.yml"
    config.write_text(config.read_text().replace("extra_save_iters: []", "extra_save_iters: [2]"))
    run_status.prune_and_report(run, 1, output.append)
    assert len(layout.list_checkpoints(run)) == 2
    config.write_text(config.read_text().replace("extra_save_iters: [2]", "extra_save_iters: []"))
    run_status.prune_and_report(run, 1, output.append)
    assert [path.name for path in layout.list_checkpoints(run)] == [layout.format_checkpoint_name(4)]
    assert output == [f"deleted {run / 'checkpoints' / layout.format_checkpoint_name(2)}"]


def test_nothing_is_deleted_from_active_runs_or_without_a_complete_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.checkpoint.run_folder.LOCK_TIMEOUT", 0.0)
    lock = RunLock(run)
    with pytest.raises(UserError, match=rf"^--keep 1: {run}: another run is using .*; wait until the run ends$"):
        run_status.prune_and_report(run, 1, print)
    lock.release()
    for step in (2, 4):
        flip(run / "checkpoints" / layout.format_checkpoint_name(step) / "model.safetensors")
    with pytest.raises(UserError, match=r"--keep 1: .*step_0000004 and all others are damaged; nothing was deleted"):
        run_status.prune_and_report(run, 1, print)
    assert len(layout.list_checkpoints(run)) == 2


@pytest.mark.parametrize(
    ("damaged", "keep", "remaining", "last"),
    [
        ((5,), 2, (3, 4, 5), "not counted: step_5, damaged: "),
        ((5,), 1, (4, 5), "not counted: step_5, damaged: "),
        ((3, 5), 2, (2, 3, 4, 5), "not counted: step_3, damaged: "),
        ((1, 2), 3, (3, 4, 5), "deleted step_2"),
        ((2, 3, 5), 4, (1, 2, 3, 4, 5), "nothing was deleted: only 2 of --keep 4 are undamaged"),
        ((1, 2, 3, 4), 2, (1, 2, 3, 4, 5), "nothing was deleted: only 1 of --keep 2 is undamaged"),
    ],
)
def test_damaged_checkpoints_are_not_counted(
    damaged: tuple[int, ...], keep: int, remaining: tuple[int, ...], last: str, run: Path
) -> None:
    """A flipped bit is detected although names and sizes are unchanged."""
    there = run / "checkpoints"
    source = layout.list_checkpoints(run)[-1]
    for step in range(1, 6):
        if not (there / layout.format_checkpoint_name(step)).exists():
            shutil.copytree(source, there / layout.format_checkpoint_name(step))
    for step in damaged:
        flip(there / layout.format_checkpoint_name(step) / "model.safetensors")
    output: list[str] = []
    run_status.prune_and_report(run, keep, output.append)
    assert [layout.parse_step(path) for path in layout.list_checkpoints(run)] == list(remaining)
    reported = output[-1]
    for step in range(1, 6):
        reported = reported.replace(str(there / layout.format_checkpoint_name(step)), f"step_{step}")
    assert reported.startswith(last)
