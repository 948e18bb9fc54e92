"""Temporary folders are removed with their owner, even if it is killed, and other folders are kept."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron.utils import atomic_directory as module
from megatron.utils.atomic_directory import OWNER_FILE, remove_stale_folders, temporary_folder

MAKER = """
from megatron.utils.atomic_directory import temporary_folder
with temporary_folder("test") as folder:
    (folder / "content").mkdir()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def start_maker() -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_of_a_killed_process_is_removed_and_of_a_living_one_stays(tmp_path: Path) -> None:
    killed, abandoned = start_maker()
    living, kept = start_maker()
    assert abandoned.is_dir()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    strangers = [tmp_path / "farfield-0", tmp_path / "farfield-log"]
    strangers[0].mkdir()  # from a version without owners, or a user's own
    strangers[1].touch()
    link = tmp_path / "farfield-link"
    link.symlink_to(kept)
    with temporary_folder("next") as folder:
        assert not abandoned.exists()
        remove_stale_folders()
        assert sorted(tmp_path.iterdir()) == sorted([kept, folder, link, *strangers])
    assert not folder.exists()
    living.communicate("\n")
    assert living.returncode == 0
    assert not kept.exists()


def test_files_of_other_machines_and_users_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, folder = start_maker()
    process.kill()
    process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(module.platform, "node", lambda: "another machine")
        remove_stale_folders()
    assert folder.is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
        remove_stale_folders()
    assert folder.is_dir()
    owner = (folder / OWNER_FILE).rename(tmp_path / "elsewhere")
    (folder / OWNER_FILE).symlink_to(owner)
    remove_stale_folders()
    assert folder.is_dir()
    owner.replace(folder / OWNER_FILE)
    remove_stale_folders()
    assert not folder.exists()


def test_without_locks_a_folder_is_removed_by_its_maker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with temporary_folder("test") as folder:
        remove_stale_folders()
        assert folder.is_dir()
        if (child := os.fork()) == 0:
            folder.joinpath("child").touch()
            os._exit(0)
        os.waitpid(child, 0)
    assert not folder.exists()
