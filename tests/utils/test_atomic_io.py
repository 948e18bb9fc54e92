"""Files with arbitrary contents, existing targets, and the project's version."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.utils.atomic_io import (
    check_new_file,
    check_new_folder,
    check_no_foreign_files,
    parse_json,
    write_text_atomically,
)
from megatron.utils.errors import UserError
from megatron.utils.project import get_farfield_version


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{", "1" * 5000, b"\xff\xff"])
def test_invalid_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the words are Python's, or name the depth)
        parse_json(text)


def test_foreign_files_are_rejected_and_ours_are_not(tmp_path: Path) -> None:
    ours, theirs, absent = (tmp_path / name for name in ("ours", "theirs", "absent"))
    ours.touch()
    theirs.touch()
    check_no_foreign_files("--output", [absent, ours], lambda path: path == ours)
    with pytest.raises(UserError, match=f"--output: {theirs} exists and is not an earlier result of this command"):
        check_no_foreign_files("--output", [absent, ours, theirs], lambda path: path == ours)


def test_the_version_is_that_of_the_project() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    version = re.search(r'^version = "(.+)"$', project.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert get_farfield_version() == version[1]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_must_be_new_never_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if not has_links:
        monkeypatch.setattr("os.link", no_links)
    path = write_text_atomically(tmp_path / "file", "first", must_be_new=True)
    with pytest.raises(UserError, match="file: cannot be written"):
        write_text_atomically(path, "second", must_be_new=True)
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_of_two_hosts_have_temporary_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two hosts with equal process IDs have separate temporary files, even if they write at the same
    time.
    """
    sync = os.fsync

    def write_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr("os.fsync", sync)
        write_text_atomically(tmp_path / "file", "second")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", write_meanwhile)
    write_text_atomically(tmp_path / "file", "first")
    assert (tmp_path / "file").read_text() == "first"


@pytest.mark.parametrize("check", [check_new_file, check_new_folder])
def test_a_name_too_long_for_its_temporary_name_is_rejected_at_once(
    check: Callable[[str, Path], None], tmp_path: Path
) -> None:
    """A system that accepts 255 bytes also needs room for the temporary name of a file that is written atomically."""
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    check("--output", tmp_path / "missing" / ("n" * (longest - 18)))
    with pytest.raises(UserError, match=r"^--output is .*n, which cannot be written to \(File name too long\); name "):
        check("--output", tmp_path / ("n" * longest))
    write_text_atomically(tmp_path / ("n" * (longest - 18)), "complete")
    with pytest.raises(UserError, match=r"File name too long"):
        check("--output", tmp_path / ("中" * (longest // 3)))
    assert [path.name for path in tmp_path.iterdir()] == ["n" * (longest - 18)]


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_written(exists: bool, tmp_path: Path) -> None:
    """A results file may be linked to a larger disk."""
    target, link = tmp_path / "disk" / "results.json", tmp_path / "results.json"
    link.symlink_to("disk/results.json")
    if exists:
        target.parent.mkdir()
        target.write_text("old")
    check_new_file("--output", link)
    write_text_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["results.json"]
