"""Errors as shown to users."""

from pathlib import Path

import pytest

from megatron.utils.errors import describe_error, shorten_text, to_path_error


def test_describe_is_one_short_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_error(ValueError()) == "ValueError"
    assert len(describe_error(ValueError("x" * 1000))) < 330


def test_a_path_is_to_blame_for_some_errors_of_the_system_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        (tmp_path / ("x" * 300)).stat()
    reported = to_path_error(caught.value)
    assert str(reported).endswith("x: cannot be used (File name too long)")
    assert len(str(reported)) < 250
    assert to_path_error(FileNotFoundError(2, "No such file", "gone")) is None
    assert to_path_error(PermissionError(13, "Permission denied")) is None  # without a path
    assert shorten_text("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
