"""Names, `latest` and pruning, on folders made by hand."""

from pathlib import Path

import pytest

from megatron.checkpoint import folder
from megatron.errors import RunError, UserError


def make(run: Path, *steps: int, latest: int | None = None) -> None:
    for step in steps:
        checkpoint = run / "checkpoints" / f"step_{step:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "progress.json").write_text("{}")
    if latest is not None:
        (run / "checkpoints" / "latest").write_text(f"step_{latest:07d}\n")


def steps(run: Path) -> list[int | None]:
    return [folder.step_of(path) for path in folder.checkpoints(run)]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    make(tmp_path, 10_000_000, 500, 2_000)
    assert steps(tmp_path) == [500, 2_000, 10_000_000]
    assert folder.name(500) == "step_0000500"


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    make(tmp_path, 5, latest=5)
    (tmp_path / "checkpoints" / "step_0000009").mkdir()
    (tmp_path / "checkpoints" / ".step_0000007.tmp").mkdir()
    assert steps(tmp_path) == [5]
    assert folder.latest(tmp_path) == tmp_path / "checkpoints" / "step_0000005"


def test_resolve_takes_a_run_its_checkpoints_or_one_of_them(tmp_path: Path) -> None:
    make(tmp_path, 5, 10, latest=5)
    five, ten = (tmp_path / "checkpoints" / folder.name(step) for step in (5, 10))
    assert folder.resolve(tmp_path) == folder.resolve(tmp_path / "checkpoints") == five
    assert folder.resolve(str(ten)) == ten


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert folder.latest(tmp_path) is None
    with pytest.raises(UserError, match="no checkpoint in it"):
        folder.resolve(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        folder.resolve(tmp_path / "run")
    make(tmp_path, 5)
    with pytest.raises(RunError, match=r"latest: is missing; name one of step_0000005"):
        folder.latest(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("step_0000006")
    with pytest.raises(RunError, match=r"names 'step_0000006', which is not a complete checkpoint"):
        folder.resolve(tmp_path)


def test_prune_keeps_the_newest_and_the_latest_and_sweeps_up(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, latest=2)
    (tmp_path / "checkpoints" / ".step_0000006.tmp").mkdir()
    assert folder.prune(tmp_path, None) == []
    assert not (tmp_path / "checkpoints" / ".step_0000006.tmp").exists()
    gone = folder.prune(tmp_path, 2)
    assert [folder.step_of(path) for path in gone] == [1, 3]
    assert steps(tmp_path) == [2, 4, 5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest", "step_0000002", "step_0000004", "step_0000005"
    ]  # fmt: skip


def test_point_to_replaces_latest(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, latest=1)
    folder.point_to(tmp_path / "checkpoints" / folder.name(2))
    assert folder.latest(tmp_path) == tmp_path / "checkpoints" / "step_0000002"
