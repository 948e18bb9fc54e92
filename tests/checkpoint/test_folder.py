"""Names, newest checkpoint, pruning and moving aside, on handmade folders."""

from pathlib import Path

import pytest

from megatron.checkpoint import layout
from megatron.utils.errors import UserError


def make(run: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = run / "checkpoints" / f"step_{step:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "progress.json").write_text("{}")


def steps(run: Path) -> list[int | None]:
    return [layout.parse_step(path) for path in layout.list_checkpoints(run)]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    make(tmp_path, 10_000_000, 500, 2_000)
    assert steps(tmp_path) == [500, 2_000, 10_000_000]
    assert layout.find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_10000000"
    assert layout.format_checkpoint_name(500) == "step_0000500"


def test_the_newest_checkpoint_is_found_without_a_pointer(tmp_path: Path) -> None:
    """The newest checkpoint is found without a pointer file, so a kill between a rename and a pointer update does not
    matter.
    """
    make(tmp_path, 140, 145)
    (tmp_path / "checkpoints" / "latest").write_text("step_0000140\n")  # as written by earlier versions
    (tmp_path / "checkpoints" / ".step_0000150.tmp").mkdir()
    assert layout.resolve_checkpoint_path(tmp_path) == tmp_path / "checkpoints" / "step_0000145"


def test_resolve_accepts_a_run_its_checkpoints_folder_or_a_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, 5, 10)
    five, ten = (tmp_path / "checkpoints" / layout.format_checkpoint_name(step) for step in (5, 10))
    assert layout.resolve_checkpoint_path(tmp_path) == layout.resolve_checkpoint_path(tmp_path / "checkpoints") == ten
    assert layout.resolve_checkpoint_path(str(five)) == five


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert layout.find_latest_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match="contains no checkpoint"):
        layout.resolve_checkpoint_path(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        layout.resolve_checkpoint_path(tmp_path / "run")


def test_prune_keeps_the_newest_and_rolled_back_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 6)
    layout.archive_checkpoints([tmp_path / "checkpoints" / layout.format_checkpoint_name(6)])
    (tmp_path / "checkpoints" / ".step_0000006.tmp").mkdir()
    assert layout.prune_checkpoints(tmp_path, None) == []
    assert not (tmp_path / "checkpoints" / ".step_0000006.tmp").exists()
    pruned = layout.prune_checkpoints(tmp_path, 2)
    assert [layout.parse_step(path) for path in pruned] == [1, 2, 3]
    assert steps(tmp_path) == [4, 5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "abandoned", "step_0000004", "step_0000005"
    ]  # fmt: skip
    assert (tmp_path / "checkpoints" / "abandoned" / "0001" / "step_0000006" / "progress.json").is_file()


def test_prune_keeps_protected_steps(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    assert [layout.parse_step(path) for path in layout.prune_checkpoints(tmp_path, 1, protected_steps=[2, 5, 9])] == [
        1,
        3,
    ]
    assert steps(tmp_path) == [2, 4, 5]


def test_rolled_back_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("before\n")
    for number in (1, 2):
        make(tmp_path, 3, 4)
        aside = layout.archive_checkpoints(
            layout.list_checkpoints(tmp_path), [tmp_path / "metrics.jsonl", tmp_path / "none"]
        )
        assert aside == tmp_path / "checkpoints" / "abandoned" / f"{number:04d}"
        assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", "step_0000003", "step_0000004"]
        assert steps(tmp_path) == []


def test_the_run_of_a_checkpoint(tmp_path: Path) -> None:
    make(tmp_path / "run", 5, 10)
    set_aside = layout.archive_checkpoints([tmp_path / "run" / "checkpoints" / layout.format_checkpoint_name(10)])
    for checkpoint in (layout.resolve_checkpoint_path(tmp_path / "run"), set_aside / layout.format_checkpoint_name(10)):
        assert layout.get_run_of_checkpoint(checkpoint) == tmp_path / "run"
    alone = layout.resolve_checkpoint_path(tmp_path / "run").rename(tmp_path / "step_0000005")
    assert layout.get_run_of_checkpoint(alone) == alone
