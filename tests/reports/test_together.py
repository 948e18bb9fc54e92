"""Extrapolation criterion, text tables, and `./deepy.py report` from files to a page."""

import io
import re
from pathlib import Path

import pytest
from pages import page_of, table_html
from rich.console import Console

from megatron.reports import paper_experiment, records, results_output, verdict_tables
from megatron.reports.combine import combine_results
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.paper_experiment import Experiment, PublishedTable
from megatron.reports.records import Record
from megatron.reports.table_formats import TextTable
from megatron.utils.errors import UserError

from .conftest import record


def silent() -> Console:
    return Console(quiet=True)


def test_the_criterion_by_hand(story: list[Record]) -> None:
    """Criterion with rotary 5.25, 12.5, 29.75; kerple_log 5.5, 5.45, 5.43; cdape 4.96, 4.9, 4.87 at 64, 512 and
    2,048.
    """
    (layout,) = build_comparison_tables(story)
    rotary, kerple, _ = verdict_tables.measure_extrapolation(layout)
    assert rotary.relative_changes == pytest.approx({512: 12.5 / 5.25 - 1, 2048: 29.75 / 5.25 - 1})
    assert (rotary.worst_length, rotary.extrapolates(4.0), rotary.extrapolates(5.0)) == (2048, False, True)
    assert kerple.relative_changes[kerple.worst_length] == pytest.approx(-0.07 / 5.5), (
        "a gain is signed, and counts by its size"
    )
    assert not kerple.extrapolates(0.012)
    assert kerple.extrapolates(0.013)
    lines = verdict_tables.build_extrapolation_table(layout, max_change=0.013).to_text().splitlines()
    assert lines[0] == "Extrapolation beyond 64 tokens, protocol last"
    assert [line.split()[0] for line in lines[2:5]] == ["rotary", "kerple_log", "cdape"], "as in the table of numbers"
    assert "+466.7%" in lines[2]
    assert lines[2].endswith("no, up to 2,048")
    assert lines[3].endswith("yes, up to 2,048")


def test_one_change_has_the_same_digits_in_sentences_tables_and_on_pages() -> None:
    """A change has the same digits in sentences, tables and pages: cdape's 0.9722 with an interval of ± 1.8%."""
    change = {"change": 6.0373 / 6.21, "change_low": 0.954, "change_high": 0.990, "change_from": 64}
    rows = [record("cdape", 64, 6.21), record("cdape", 2048, 6.0373, **change)]
    (table,) = build_comparison_tables(rows)
    assert results_output.describe_changes(table) == [
        "cdape falls from 6.21 at 64 tokens to 6.04 at 2,048 tokens (-2.8%)."
    ]
    grid = verdict_tables.build_extrapolation_table(table)
    assert grid is not None
    assert dict(grid.rows)["cdape"][0] == "-2.8% [-4.6%, -1.0%]"
    assert "cdape 6.04 (-2.8% from 64 tokens, falls)" in page_of(rows)


def test_methods_without_a_verdict_keep_the_order_of_the_table() -> None:
    rows = [record("learned", 64, 5.0, max_length=64), record("a", 64, 5.0), record("a", 128, 5.0)]
    grid = verdict_tables.build_extrapolation_table(build_comparison_tables(rows)[0])
    assert grid is not None
    assert [name for name, _ in grid.rows] == ["learned", "a"]


def test_its_interval_is_that_of_the_change_from_the_training_length() -> None:
    change = {"change": 1.2, "change_low": 1.1, "change_high": 1.35}
    for base, text in ((64, "+20.0% [+10.0%, +35.0%]"), (32, "+20.0%")):
        rows = [record("a", length, 5.0) for length in sorted({base, 64})] + [
            record("a", 128, 6.0, **change, change_from=base)
        ]
        grid = verdict_tables.build_extrapolation_table(build_comparison_tables(rows)[0])
        assert grid is not None
        assert dict(grid.rows)["a"][0] == text


def test_lengths_below_and_tables_of_something_else_have_none(story: list[Record]) -> None:
    assert (
        verdict_tables.build_extrapolation_table(
            build_comparison_tables([record("a", 128, 5.0), record("a", 256, 5.0)])[0]
        )
        is None
    )
    by_place = [each.replace(axis="position", place=float(each.length), length=2048) for each in story]
    assert verdict_tables.build_extrapolation_table(build_comparison_tables(by_place)[0]) is None


def test_training_lengths_are_compared_if_targets_match() -> None:
    same = {"target_digest": "d"}
    rows = [
        record("b", 64, 5.0, **same), record("b", 128, 4.5, **same), record("b", 256, 9.0, **same),
        record("a", 64, 6.0, train_length=32, max_length=64, **same),
        record("c", 128, 4.0, train_length=128, **same), record("c", 128, 4.2, seed=2, train_length=128, **same),
        record("c", 256, 3.9, train_length=128, **same),
    ]  # fmt: skip
    (grid,) = verdict_tables.build_train_length_tables(build_comparison_tables(rows))
    assert grid.column_headers == ("trained at", "64", "128", "256")
    assert dict(grid.rows) == {
        "a": ("32", "6.00 (n 1)", "max 64", "max 64"),
        "b": ("64", "5.00 (n 1)*", "4.50 (n 1)", "9.00 (n 1)"),
        "c": ("128", "–", "4.10 ± 0.14*", "3.90 (n 1)*"),
    }
    assert [name for name, _ in grid.rows] == ["a", "b", "c"]
    assert "Cells are mean ± standard deviation of 2 seeds, or of n seeds where shown." in grid.notes
    for other in (
        [*rows[:3]],
        [each.replace(target_digest=None) for each in rows],
        [*rows[:3], rows[3].replace(target_digest="e")],
    ):
        assert verdict_tables.build_train_length_tables(build_comparison_tables(other)) == []


def test_different_numbers_of_targets_are_kept_separately() -> None:
    few, many = (
        [record("a", length, 5.0 + n / 64, targets=n, target_digest=f"{n}") for length in (64, 128)] for n in (16, 64)
    )
    reported = [layout.title for layout in build_comparison_tables([*few, *many])]
    assert [title.rpartition("protocol last")[2] for title in reported] == [
        ", 16 tokens per window",
        ", 64 tokens per window",
    ]
    titles = [
        grid.title
        for layout in build_comparison_tables([*few, *many])
        if (grid := verdict_tables.build_extrapolation_table(layout))
    ]
    assert len(set(titles)) == 2
    assert build_comparison_tables(few)[0].title.endswith("protocol last")
    assert records.merge_records(few, many, same_run=True) == [*few, *many]
    assert records.merge_records([*few, *many], few[:1], same_run=True) == [*many, few[0]]


def test_trivial_baselines_remain_next_to_the_models_that_they_belong_to() -> None:
    def evaluate(run: str, windows: int, *lengths: int) -> list[Record]:
        shared = {"metric": "accuracy", "protocol": "task", "text_digest": "copy", "target_digest": f"{windows}"}
        shared["windows"] = windows
        models = [record("rotary", length, 0.5, run=run, **shared) for length in lengths]
        return [*models, *(record("floor: a guess", length, 0.1, run=None, **shared) for length in lengths)]

    many, few = evaluate("runs/a", 512, 64, 128), evaluate("runs/b", 64, 64)
    assert records.merge_records(many, few, same_run=False) == [*many, *few]
    assert records.merge_records(many, evaluate("runs/b", 512, 64), same_run=False) == [
        many[0], many[1], many[3], *evaluate("runs/b", 512, 64)
    ]  # fmt: skip
    for again in (evaluate("runs/a", 512, 64), evaluate("runs/a", 64, 64, 128)):
        assert records.merge_records(many, again, same_run=False) == again, "no baseline without a model"


def test_losses_smoothed_over_other_widths_are_not_compared() -> None:
    curves = [
        record(method, 128, 1.0, metric="loss", axis="tokens_seen", place=4.0, smoothing=width, target_digest="d")
        for method, width in (("a", 101), ("b", 5), ("c", 101))
    ]
    assert [table.methods for table in build_comparison_tables(curves)] == [("a", "c"), ("b",)]


def test_a_method_whose_positions_end_at_the_training_length_is_named() -> None:
    rows = [record("learned", 64, 5.0, max_length=64), record("a", 64, 5.0), record("a", 128, 5.1)]
    grid = verdict_tables.build_extrapolation_table(build_comparison_tables(rows)[0])
    assert grid is not None
    assert dict(grid.rows)["learned"][2] == "its maximum length is 64"


def test_a_table_as_text_and_html() -> None:
    grid = TextTable("A <b>", "method", ("x|y", "z"), (("one", ("1", "22")), ("three", ("<3", "4"))), ("Note.",))
    assert grid.to_text() == "A <b>\nmethod  x|y  z\none     1    22\nthree   <3   4\nNote.\n"
    assert "&lt;3" in table_html(grid.to_html())
    assert "<span>A &lt;b&gt;</span></caption>" in table_html(grid.to_html())
    assert '<p class="notes">Note.</p>' in table_html(grid.to_html())
    assert "<3" not in table_html(grid.to_html())


def test_long_cells_of_a_table_as_text_continue_on_further_lines() -> None:
    names = ", ".join(f"method_{number}" for number in range(30))
    text = TextTable("A", "row", ("long", "short"), (("one", (names, "1")), ("two", ("–", "2")))).to_text()
    assert max(map(len, text.splitlines())) <= 75
    lines = text.splitlines()[2:]
    assert " ".join(line[5:].split("  ")[0].strip() for line in lines[:-1]) == names
    assert lines[0].endswith("  1")
    assert lines[-1].startswith("two  –  ")


def test_a_folder_with_a_published_page_names_it(story: list[Record], tmp_path: Path) -> None:
    records.write_records(tmp_path / "a" / "results.json", story)
    console = Console(file=io.StringIO(), width=200)
    combine_results([tmp_path / "a"], console, output=tmp_path / "a.md")
    assert "published page" not in console.file.getvalue()
    combine_results([tmp_path / "a"], console)
    assert f"note: the published page of {tmp_path / 'a'} is {tmp_path / 'a.md'}\n" in console.file.getvalue()


def test_files_become_a_page(story: list[Record], tmp_path: Path) -> None:
    seeds = [each.replace(seed=each.seed + 1, value=each.value * 1.01) for each in story]
    records.write_records(tmp_path / "results.json", story)
    records.write_records(tmp_path / "other.json", seeds)
    console = Console(record=True, width=200)
    found = combine_results(
        [tmp_path, tmp_path / "other.json"], console, output=tmp_path / "page.html", against="cdape", title="All of it"
    )
    assert found == [*story, *seeds]
    page, printed = (tmp_path / "page.html").read_text(), console.export_text()
    for text in ("compared with cdape", "extrapolates (|r| &lt; 0.1)", "<title>All of it</title>", "Conclusions"):
        assert text in page
    assert "Extrapolation beyond 64 tokens" in printed
    assert "p: paired two-sided t-test of logarithms over 2 seeds; Holm" in printed


def test_experiments_are_sections_with_their_papers_tables(story: list[Record], tmp_path: Path) -> None:
    table = PublishedTable(
        "A paper, table 1", 512, "perplexity", (512, 4096), {"rotary": [4.0, 9.0], "cdape": [3.0, None]}
    )
    reported = Experiment("Its first table", "cdape", (table,), ("They had <more> text.",))
    first = records.write_records(tmp_path / "first.json", story)
    paper_experiment.write_experiment(first, reported)
    assert paper_experiment.read_experiment(first) == reported
    second = records.write_records(tmp_path / "second" / "results.json", story)
    paper_experiment.write_experiment(second, Experiment(None, "nobody yet"))
    alone = records.write_records(tmp_path / "alone.json", story)
    assert paper_experiment.read_experiment(alone) is None
    console = Console(record=True, width=200)
    found = combine_results(
        [first, paper_experiment.get_experiment_path(first), second.parent, alone],
        console,
        output=tmp_path / "page.html",
        title="All",
    )
    assert found == [*story] * 3
    page, printed = (tmp_path / "page.html").read_text(), console.export_text()
    assert page.count("<caption><span>Published | ours: A paper, table 1") == 1
    assert len(re.findall(r"<caption><span>[^<]*compared with cdape", page)) == 1
    assert "They had &lt;more&gt; text." in page
    assert page.count('<figure class="chart') == 3
    # Records without an experiment come first; links lead to the headings.
    assert re.findall(r'href="#section-(\d)"', page) == re.findall(r'id="section-(\d)"', page) == ["1", "2", "3"]
    assert page.index('id="section-1"') < page.index("Its first table</h2>") < page.index('id="section-3"')
    assert printed.index("Its first table") < printed.index("order agreement τ")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "no JSON",
        '{"title": "x", "against": null, "published": [{}], "differences": []}',
        *(
            '{"title": null, "against": null, "differences": [], "published": [{"source": "", "metric": "perplexity", '
            f'"train_length": {train_length}, "lengths": [{length}], "rows": {{"a": [{values}]}}}}]}}'
            for train_length, length, values in (
                (0, 64, 5),
                (64, 10**30, 5),
                (64, 64, '"5"'),
                (64, 64, 1e308),
                (64, 64, "5, 6"),
            )
        ),
        '{"title": null, "against": null, "published": [], "differences": [], '
        '"leaderboard": {"baseline": "a", "ablations": [], "num_shown": "six"}}',
    ],
)
def test_an_invalid_experiment_is_rejected(text: str, story: list[Record], tmp_path: Path) -> None:
    path = records.write_records(tmp_path / "results.json", story)
    (tmp_path / "results.experiment.json").write_text(text)
    with pytest.raises(UserError, match=r"results\.experiment\.json: not an experiment of a sweep"):
        combine_results([path], silent())


def test_incompatible_results_are_reported_in_one_line(story: list[Record], tmp_path: Path) -> None:
    path = records.write_records(tmp_path / "results.json", story)
    for files, against, message in (
        ([tmp_path / "no.json"], None, "no such file"),
        ([path], "kerple", "unknown method; did you mean kerple_log"),
        ([records.write_records(tmp_path / "one.json", story[:1])], "rotary", "the only method in its table"),
        ([records.write_records(tmp_path / "none.json", [])], None, "no records found"),
    ):
        with pytest.raises(UserError, match=message):
            combine_results(files, silent(), output=tmp_path / "page.html", against=against)
    assert not (tmp_path / "page.html").exists()
