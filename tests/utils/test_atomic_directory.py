"""Folders are whole or not there, whatever ends their writers."""

import os
from pathlib import Path

import pytest
from killed import die, killed

from megatron.utils import atomic_directory as directories
from megatron.utils.atomic_directory import atomic_directory, recover_abandoned


def write(target: Path, text: str, **choices: bool) -> None:
    with atomic_directory(target, **choices) as folder:
        (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_made_replaced_or_kept(tmp_path):
    target = tmp_path / "deep" / "er"
    write(target, "one")
    write(target, "two")
    assert (target / "file").read_text() == "two"
    with atomic_directory(target, replace=False) as folder:
        (folder / "file").write_text("three")
    assert (target / "file").read_text() == "two"
    assert names(target.parent) == ["er"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_exception_leaves_what_was_there(tmp_path):
    write(tmp_path / "x", "one")
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "x"):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "one"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch, error):
    write(tmp_path / "x", "one")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(error):
        write(tmp_path / "x", "two")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "one"


def test_what_a_killed_process_left_is_removed(tmp_path):
    def work() -> None:
        with atomic_directory(tmp_path / "x") as folder:
            (folder / "file").write_text("half")
            die()

    killed(work)
    assert len(names(tmp_path)) == 1  # the kill left something to remove
    recover_abandoned(tmp_path / "y")
    assert len(names(tmp_path)) == 1  # but not for another folder
    recover_abandoned(tmp_path / "x")
    assert names(tmp_path) == []


def test_a_stranger_in_the_way_keeps_nothing_else(tmp_path, monkeypatch):
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self))))
    (tmp_path / ".x.00000000.tmp").write_text("first, and no folder")

    def work() -> None:
        with atomic_directory(tmp_path / "x"):
            die()

    killed(work)
    assert len(names(tmp_path)) == 2
    recover_abandoned(tmp_path / "x")
    assert names(tmp_path) == [".x.00000000.tmp"]


def test_a_folder_whose_place_was_empty_for_a_moment_is_put_back(tmp_path, monkeypatch):
    write(tmp_path / "x", "one")
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: die() if self.name == "new" else rename(self, to))
    killed(lambda: write(tmp_path / "x", "two"))
    assert not (tmp_path / "x").exists()
    recover_abandoned(tmp_path / "x")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "one"


def test_the_work_of_the_living_and_of_strangers_is_left_alone(tmp_path):
    stranger = tmp_path / ".x.abcdefgh.tmp"
    (stranger / "mine").mkdir(parents=True)
    with atomic_directory(tmp_path / "x") as folder:
        recover_abandoned(tmp_path / "x")  # another descriptor: a lock belongs to the one that took it
        write(tmp_path / "x", "by another")
        assert folder.is_dir()
        (folder / "file").write_text("mine")
    assert (tmp_path / "x" / "file").read_text() == "mine"
    assert names(tmp_path) == [stranger.name, "x"]


def test_a_file_system_without_locks_keeps_what_nobody_may_own(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(directories.fcntl, "flock", no_locks)
    with atomic_directory(tmp_path / "x") as folder:
        recover_abandoned(tmp_path / "x")
        (folder / "file").write_text("text")
    assert names(tmp_path) == ["x"]
