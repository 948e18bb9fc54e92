"""Formatted numbers, compared with handwritten texts."""

from pathlib import Path

import pytest

from megatron.utils.formatting import (
    find_nearest_name,
    format_approximate_duration,
    format_decimal,
    format_duration,
    format_flops,
    format_flops_per_second,
    format_quantity,
    suggest_names,
    suggest_path,
)


def test_one_thread_is_one() -> None:
    quantities = [format_quantity(count, "thread") for count in (0, 1, 2, 1000)]
    assert quantities == ["0 threads", "1 thread", "2 threads", "1,000 threads"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7444, "2 h 04 min"),
        (10921, "3 h 02 min"),
        (15552000, "180 days"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01, "1 s"), (45, "45 s"), (125, "2 min"), (3600 * 5, "5 h"), (180.2 * 86400, "180 days")],
)
def test_about(seconds: float, text: str) -> None:
    assert format_approximate_duration(seconds) == f"about {text}"


@pytest.mark.parametrize(
    ("tflops", "text"),
    [(0.0123, "12.3 GFLOP/s"), (0.9, "900 GFLOP/s"), (1.0, "1 TFLOP/s"), (412.3, "412 TFLOP/s")],
)
def test_speed(tflops: float, text: str) -> None:
    assert format_flops_per_second(tflops) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 FLOP"),
        (950, "950 FLOP"),
        (12_345, "12.3 kFLOP"),
        (4.56e12, "4.56 TFLOP"),
        (1e12, "1 TFLOP"),
        (3e27, "3e+03 YFLOP"),
    ],
)
def test_flop(count: float, text: str) -> None:
    assert format_flops(count) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(2.5, "2.50"), (-3.0, "-3.00"), (9_999_999.0, "9999999.00"), (1e7, "1.00e+07"), (1.234e304, "1.23e+304"),
     (float("inf"), "inf"), (float("nan"), "nan")],
)  # fmt: skip
def test_decimals_become_exponents(number: float, text: str) -> None:
    assert format_decimal(number, 2) == text


def test_a_name_is_compared_with_the_beginnings_of_longer_ones() -> None:
    cards = ["a100-40gb", "a100-80gb", "h100", "h100-nvl", "v100-16gb", "v100-32gb"]
    assert suggest_names("v1000", cards) == "did you mean v100-16gb or v100-32gb?"
    assert suggest_names("A100", cards) == "did you mean a100-40gb or a100-80gb?"
    assert suggest_names("h1000", cards) == "did you mean h100?"
    assert suggest_names("xyz", cards) == ""
    assert find_nearest_name("v100", cards) == "v100-16gb"
    assert suggest_names("evaluat", ["evaluate", "evaluations"]) == "did you mean evaluate?"
    assert suggest_names("Shakespear", ["python", "shakespeare"]) == "did you mean shakespeare?"
    assert suggest_names("port", ["output", "figure_font"]) == ""


def test_a_broken_link_is_not_suggested_for_itself(tmp_path: Path) -> None:
    (tmp_path / "book.txt").symlink_to("gone.txt")
    (tmp_path / "texts").symlink_to("/nowhere/texts")
    assert suggest_path(tmp_path / "book.txt") == f"{tmp_path}/book.txt is a broken symbolic link to gone.txt; "
    expected = f"{tmp_path}/texts is a broken symbolic link to /nowhere/texts; "
    assert suggest_path(tmp_path / "texts" / "a.txt") == expected
    assert suggest_path(tmp_path / "texts", is_folder=True) == expected
    (tmp_path / "book.md").touch()
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    assert suggest_path(tmp_path / "boook.md") == f"did you mean {tmp_path}/book.md? "
    assert "broken symbolic link to loop.txt" in suggest_path(tmp_path / "loop.txt")
