"""Folders are complete or absent, even if their writers are killed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sigkill import die, killed

from megatron.utils import atomic_directory as directories
from megatron.utils.atomic_directory import (
    FolderConflictError,
    atomic_directory,
    read_folder_version,
    recover_stale_work,
)


def write(target: Path, text: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    with atomic_directory(target, replaces=read_folder_version(target)) as folder:
        (folder / "file").write_text(text)
        meanwhile()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_made_and_replaced(tmp_path):
    target = tmp_path / "deep" / "er"
    write(target, "one")
    write(target, "two")
    assert (target / "file").read_text() == "two"
    assert names(target.parent) == ["er"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()


@pytest.mark.parametrize("was_there", [None, "empty", "full"])
@pytest.mark.parametrize("change", ["another", "more", "a file"])
def test_files_created_concurrently_are_never_replaced(tmp_path, was_there, change):
    target = tmp_path / "x"
    if was_there is not None:
        target.mkdir()
    if was_there == "full":
        write(target, "before")

    def write_meanwhile() -> None:
        if change == "more":
            target.mkdir(exist_ok=True)
            (target / "notes").write_text("theirs")
        elif change == "another":
            write(target, "theirs")
        else:
            shutil.rmtree(target, ignore_errors=True)
            target.write_text("theirs")

    (tmp_path / "x-2").mkdir()
    with pytest.raises(
        FolderConflictError, match=f"{target}: another command wrote it .* is in {target}-3$"
    ) as refused:
        write(target, "mine", write_meanwhile)
    assert refused.value.exit_code == 1
    theirs = {"more": target / "notes", "another": target / "file", "a file": target}[change]
    assert (theirs.read_text(), (tmp_path / "x-3" / "file").read_text()) == ("theirs", "mine")
    assert names(tmp_path) == ["x", "x-2", "x-3"]


def test_a_folder_that_changes_just_before_it_is_replaced_is_put_back(tmp_path, monkeypatch):
    target = tmp_path / "x"
    write(target, "before")
    rename = Path.rename

    def rename_late(self: Path, to: Path) -> Path:
        if to.name == "old":
            monkeypatch.setattr(Path, "rename", rename)
            write(target, "theirs")
        return rename(self, to)

    with pytest.raises(FolderConflictError):
        write(target, "mine", lambda: monkeypatch.setattr(Path, "rename", rename_late))
    assert ((target / "file").read_text(), (tmp_path / "x-2" / "file").read_text()) == ("theirs", "mine")


def test_of_two_folders_with_the_same_contents_one_is_discarded(tmp_path):
    with atomic_directory(tmp_path / "x", on_conflict="discard"):
        write(tmp_path / "x", "theirs")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "theirs"


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_exception_keeps_existing_files(tmp_path):
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


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    def work() -> None:
        with atomic_directory(tmp_path / "x") as folder:
            (folder / "file").write_text("half")
            die()

    killed(work)
    assert len(names(tmp_path)) == 1  # the kill left something to remove
    recover_stale_work(tmp_path / "y")
    assert len(names(tmp_path)) == 1  # but not for another folder
    recover_stale_work(tmp_path / "x")
    assert names(tmp_path) == []


def test_other_files_do_not_prevent_the_removal_of_stale_folders(tmp_path, monkeypatch):
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self))))
    (tmp_path / ".x.00000000.tmp").write_text("first, and no folder")

    def work() -> None:
        with atomic_directory(tmp_path / "x"):
            die()

    killed(work)
    assert len(names(tmp_path)) == 2
    recover_stale_work(tmp_path / "x")
    assert names(tmp_path) == [".x.00000000.tmp"]


def test_a_replaced_folder_is_restored_after_an_interruption(tmp_path, monkeypatch):
    write(tmp_path / "x", "one")
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: die() if self.name == "new" else rename(self, to))
    killed(lambda: write(tmp_path / "x", "two"))
    assert not (tmp_path / "x").exists()
    recover_stale_work(tmp_path / "x")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "one"


def test_work_of_running_and_foreign_processes_is_kept(tmp_path):
    stranger = tmp_path / ".x.abcdefgh.tmp"
    (stranger / "mine").mkdir(parents=True)
    with atomic_directory(tmp_path / "x") as folder:
        recover_stale_work(tmp_path / "x")  # another descriptor, because a lock belongs to its descriptor
        write(tmp_path / "y", "by another")
        assert folder.is_dir()
        (folder / "file").write_text("mine")
    assert (tmp_path / "x" / "file").read_text() == "mine"
    assert names(tmp_path) == [stranger.name, "x", "y"]


def test_a_file_system_without_locks_keeps_unowned_files(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(directories.fcntl, "flock", no_locks)
    with atomic_directory(tmp_path / "x") as folder:
        recover_stale_work(tmp_path / "x")
        (folder / "file").write_text("text")
    assert names(tmp_path) == ["x"]
