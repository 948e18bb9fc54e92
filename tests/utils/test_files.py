"""Files that may hold anything, and places that hold something already."""

from pathlib import Path

import pytest

from megatron.utils.atomic_io import parse_json, refuse_foreign_files
from megatron.utils.errors import UserError, shorten_text, to_path_error


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{", "1" * 5000, b"\xff\xff"])
def test_whatever_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the words are Python's, or name the depth)
        parse_json(text)


def test_files_of_others_are_refused_and_ours_are_not(tmp_path: Path) -> None:
    ours, theirs, absent = (tmp_path / name for name in ("ours", "theirs", "absent"))
    ours.touch()
    theirs.touch()
    refuse_foreign_files("--output", [absent, ours], lambda path: path == ours)
    with pytest.raises(UserError, match=f"--output: {theirs} is there, and is none of this command's earlier results"):
        refuse_foreign_files("--output", [absent, ours, theirs], lambda path: path == ours)


def test_a_path_is_to_blame_for_some_errors_of_the_system_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        (tmp_path / ("x" * 300)).stat()
    told = to_path_error(caught.value)
    assert str(told).endswith("x: cannot be used (File name too long)")
    assert len(str(told)) < 250
    assert to_path_error(FileNotFoundError(2, "No such file", "gone")) is None
    assert to_path_error(PermissionError(13, "Permission denied")) is None  # of no path
    assert shorten_text("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
