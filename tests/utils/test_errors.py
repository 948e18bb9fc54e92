"""Errors as shown to users."""

from pathlib import Path

import pytest

from megatron.utils.errors import check_reachable, describe_cause, describe_error, shorten_text, to_path_error


def test_describe_is_one_short_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_error(ValueError()) == "ValueError"
    assert len(describe_error(ValueError("x" * 1000))) < 330


def test_the_count_of_a_full_disk_has_a_unit() -> None:
    error = OSError("250000 requested and 480 written")  # as numpy reports it
    assert describe_cause(error) == "the disk is full or failed: 480 of 250,000 array elements were written"


def test_a_path_is_to_blame_for_some_errors_of_the_system_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        (tmp_path / ("x" * 300)).stat()
    reported = to_path_error(caught.value)
    assert str(reported).endswith("x: cannot be used (File name too long)")
    assert len(str(reported)) < 250
    assert to_path_error(FileNotFoundError(2, "No such file", "gone")) is None
    assert to_path_error(PermissionError(13, "Permission denied")) is None  # without a path
    assert shorten_text("a\nb\x1b[2J") == "a\\nb\\x1b[2J"


def test_a_path_that_cannot_be_looked_up_is_not_reported_as_missing(tmp_path: Path) -> None:
    """Python 3.14's `Path.exists` returns False for such a path, and earlier ones raise the error."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "gone", tmp_path / "file" / "inside"):
        check_reachable(path)
    with pytest.raises(OSError, match="File name too long"):
        check_reachable(tmp_path / ("x" * 300))
