"""In a report of several files, a name refers to a single training."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron.reports import paper_experiment, plots, records
from megatron.reports.combine import combine_results, find_contradictions
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.method_rows import disambiguate_methods
from megatron.reports.paper_experiment import Experiment
from megatron.reports.records import Record
from megatron.reports.results_output import print_comparison_tables, write_results
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


def trained(digest: str | None, seed: int, run: str, length: int = 64, **more: object) -> Record:
    return record("a", length, 5.0 + seed, seed=seed, run=run, step=10, training_digest=digest, **more)


def test_only_equal_trainings_are_seeds_of_one_another() -> None:
    same = [trained("x", 1, "runs/a"), trained("x", 2, "runs/b")]
    assert names(same) == ["a", "a"]
    assert names([*same, trained("y", 3, "runs/c")]) == ["a [runs/a, runs/b]"] * 2 + ["a [runs/c]"]
    # A shared parent folder, or equal paths on two machines, do not identify a training.
    assert names([trained("x", 1, "s/seed_1"), trained("y", 7, "s/seed_7")]) == ["a [s/seed_1]", "a [s/seed_7]"]
    assert names([trained("x", 1, "runs/a"), trained("y", 7, "runs/a")]) == [
        "a [runs/a, training x]", "a [runs/a, training y]"
    ]  # fmt: skip
    # Scored at other lengths, they would still share a row.
    assert names([trained("x", 1, "runs/a"), trained("y", 7, "runs/b", 128)]) == ["a [runs/a]", "a [runs/b]"]
    # Training lengths have separate tables.
    apart = [trained("x", 1, "runs/a"), trained("y", 7, "runs/b", train_length=32)]
    assert disambiguate_methods(apart) == apart
    # Repeated seeds split one training and leave the others unchanged.
    twice = [trained("y", 1, "runs/c"), trained("y", 1, "runs/d")]
    assert names([*same, *twice]) == ["a [runs/a, runs/b]"] * 2 + ["a [runs/c]", "a [runs/d]"]
    labeled = disambiguate_methods([*same, *twice])
    assert disambiguate_methods(labeled) == labeled


def test_no_output_averages_two_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No output averages two trainings, whether separate evaluations are combined or gathered in one folder."""
    monkeypatch.setattr(plots, "render_plots_png", lambda found, **_: b"")
    both = [trained("x", 1234, "runs/a"), trained("y", 7, "runs/b")]
    paths = [records.write_records(tmp_path / f"{each.seed}.json", [each]) for each in both]
    console = Console(record=True, width=200)
    combine_results(paths, console, output=tmp_path / "page.html")
    write_results(tmp_path / "both", both)
    print_comparison_tables(console, both)
    reported = console.export_text()
    files = [(tmp_path / name).read_text() for name in ("page.html", "both/results.md", "both/results.csv")]
    for text in (reported, *files):
        assert "a [runs/a]" in text
        assert "a [runs/b]" in text
    assert "±" not in reported
    assert records.read_records(tmp_path / "both" / "results.json") == both
    choices = r"--against a: unknown method; choose from a \[runs/a\], a \[runs/b\]"
    with pytest.raises(UserError, match=choices):
        combine_results(paths, Console(quiet=True), against="a")


def test_an_empty_line_separates_tables() -> None:
    console = Console(file=io.StringIO(), record=True, width=200)
    print_comparison_tables(console, [trained("x", 1, "runs/a"), trained("y", 1, "runs/b", train_length=32)])
    lines = console.export_text().splitlines()
    titles = [index for index, line in enumerate(lines) if line.startswith("Perplexity")]
    assert titles[0] == 0
    assert len(titles) > 1
    assert [lines[index - 1] for index in titles[1:]] == [""] * (len(titles) - 1)


def test_results_without_digests_count_as_seeds_with_a_note() -> None:
    note = "The results of a lack training digests: runs with the same name and number of steps count as seeds"
    for digest, folders, is_said in (
        (None, ("runs/a", "runs/b"), True),
        ("x", ("runs/a", "runs/b"), True),  # one of the two is known
        (None, ("runs/a/seed_1", "runs/a/seed_2"), False),  # in a sweep
    ):
        found = [trained(None, 1, folders[0]), trained(digest, 2, folders[1])]
        assert names(found) == ["a", "a"]
        (table,) = build_comparison_tables(found)
        assert any(line.startswith(note) for line in table.notes) == is_said
    (table,) = build_comparison_tables([trained("x", 1, "runs/a"), trained("x", 2, "runs/b")])
    assert not any("lack training digests" in line for line in table.notes)


def test_contradicting_files_are_reported(tmp_path: Path) -> None:
    for name, factor in (("one", 1.0), ("two", 1.5), ("same", 1.5)):
        rows = [record("a", length, factor * length, seed=1, run="runs/a") for length in (64, 128)]
        records.write_records(tmp_path / f"{name}.json", rows)
    files = {
        path: records.read_records(path) for path in (tmp_path / f"{name}.json" for name in ("one", "two", "same"))
    }
    (line,) = find_contradictions(files)
    one, two, _ = files
    assert line == f"{two}: 2 values differ from {one} for the same runs; using this file"
    console = Console(record=True, width=400)
    combine_results([one, two], console)
    assert console.export_text().count("note: ") == 1
    paper_experiment.write_experiment(two, Experiment("Its own section"))  # where nothing replaces anything
    combine_results([one, two], console)
    assert "note: " not in console.export_text()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "page.pdf",
            r"^--output .*page\.pdf: it must be a name ending in \.html, \.htm, \.md, or \.tex$",
        ),
        ("page.csv", r"or \.tex; results\.csv is already next to results\.json$"),
        ("folder.html", r"^--output is .*folder\.html, which is a folder; name a file$"),
        ("file/page.html", r"^--output is .*page\.html, but .*file is a file; name a file$"),
    ],
)
def test_an_unwritable_page_is_rejected_before_reading_records(output: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        combine_results([tmp_path / "nowhere.json"], Console(quiet=True), output=tmp_path / output)


@given(
    st.lists(
        st.builds(
            lambda method, seed, run, step, digest, length: record(
                method, length, 5.0, seed=seed, run=run, step=step, training_digest=digest
            ),
            st.sampled_from("ab"),
            st.integers(1, 3),
            st.sampled_from([None, "r/seed_1", "r/seed_2", "s/seed_1", "p"]),
            st.sampled_from([10, 20]),
            st.sampled_from([None, "x", "y"]),
            st.sampled_from([64, 128]),
        ),
        max_size=8,
    )
)
def test_every_row_is_one_training_with_one_run_of_each_seed(found: list[Record]) -> None:
    named = disambiguate_methods(found)
    assert disambiguate_methods(named) == named
    rows: dict[str, list[Record]] = {}
    for each in named:
        rows.setdefault(each.method, []).append(each)
    for row in rows.values():
        assert len({each.step for each in row}) == 1
        assert len({each.training_digest for each in row} - {None}) <= 1
        assert len({(each.seed, each.run) for each in row}) == len({each.seed for each in row})
