"""A name stands for one thing in a report of several files."""

from pathlib import Path

import pytest
from rich.console import Console

from megatron.reports import paper_experiment, records
from megatron.reports.combine import combine_results, disambiguate_methods, find_contradictions
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.paper_experiment import Experiment
from megatron.reports.records import Record
from megatron.utils.errors import UserError

from .conftest import record


def names(found: list[Record]) -> list[str]:
    return [each.method for each in disambiguate_methods(found)]


def test_seeds_of_one_method_are_averaged() -> None:
    found = [record("a", 64, 5.0, seed=seed, run=f"runs/x/a/seed_{seed}", step=10) for seed in (1, 2)]
    assert disambiguate_methods(found) == found


def test_two_runs_of_one_seed_are_two_methods_everywhere() -> None:
    found = [
        record("a", length, 5.0, seed=seed, run=f"runs/{sweep}/a/seed_{seed}", step=10)
        for sweep in ("x", "y")
        for seed, length in ((1, 64), (2, 64), (2, 128))
        if (sweep, seed) != ("y", 2)
    ]
    assert names(found) == ["a [runs/x/a]"] * 3 + ["a [runs/y/a]"]
    (layout,) = build_comparison_tables(disambiguate_methods(found))
    assert layout.cells["a [runs/x/a]", 64].deviation == 0
    assert layout.cells["a [runs/y/a]", 64].deviation is None


def test_runs_of_different_numbers_of_steps_are_too() -> None:
    found = [record("a", 64, 5.0, seed=seed, run=f"runs/{seed}", step=10 * seed) for seed in (1, 2)]
    assert names(found) == ["a [runs/1]", "a [runs/2]"]


def test_other_tables_do_not_mix() -> None:
    found = [record("a", 64, 5.0, seed=1, run=f"runs/{length}", train_length=length) for length in (32, 64)]
    assert disambiguate_methods(found) == found


def test_a_file_that_contradicts_another_is_told(tmp_path: Path) -> None:
    for name, factor in (("one", 1.0), ("two", 1.5), ("same", 1.5)):
        rows = [record("a", length, factor * length, seed=1, run="runs/a") for length in (64, 128)]
        records.write_records(tmp_path / f"{name}.json", rows)
    files = {
        path: records.read_records(path) for path in (tmp_path / f"{name}.json" for name in ("one", "two", "same"))
    }
    (line,) = find_contradictions(files)
    one, two, _ = files
    assert line == f"{two}: has 2 numbers of runs of which {one} has others; these here are shown"
    console = Console(record=True, width=400)
    combine_results([one, two], console)
    assert console.export_text().count("note: ") == 1
    paper_experiment.write_experiment(two, Experiment("Its own section"))  # where nothing takes the place of anything
    combine_results([one, two], console)
    assert "note: " not in console.export_text()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "page.pdf",
            r"^--output .*page\.pdf: its name must end in \.html for a page, \.md, or \.tex; results\.csv",
        ),
        ("folder.html", r"^--output .*folder\.html: is a folder$"),
        ("file/page.html", r"^--output is .*file, which is a file"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(
    output: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        combine_results([tmp_path / "nowhere.json"], Console(quiet=True), output=tmp_path / output)
