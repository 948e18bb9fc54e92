"""Missing seeds and lengths: each number states its basis, and a list names what is missing."""

import math
from pathlib import Path

import pytest
from pages import page_of, table_html
from rich.console import Console

from megatron.reports import (
    paper_experiment,
    plots,
    records,
    report,
    results_output,
    significance,
    table_formats,
    verdict_tables,
)
from megatron.reports.combine import combine_results
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.leaderboard import Ablation, Leaderboard
from megatron.reports.paper_experiment import Experiment, PublishedTable
from megatron.reports.records import Record
from megatron.reports.report import ReportSection
from megatron.reports.results_output import write_results
from megatron.reports.run_records import RunFailure, get_failures_path, read_failures
from megatron.reports.significance import compare_methods
from megatron.utils.errors import UserError

from .conftest import record

DIVERGED = RunFailure("gone", 1, "the loss is not finite", step=1200)


def run(method: str, seed: int, start: float, end: float | None) -> list[Record]:
    """Build a run scored at 64 tokens, and at 128 unless `end` is None."""
    change = {} if end is None else {"change": end / start, "change_from": 64}
    found = [record(method, 64, start, seed), *([] if end is None else [record(method, 128, end, seed, **change)])]
    return [each.replace(target_digest="d") for each in found]


@pytest.fixture
def holes() -> list[Record]:
    """Records: log has three seeds, the third without 128 tokens; t5 has the first two; alibi only the last."""
    return [
        *run("log", 1, 5.0, 6.0), *run("log", 2, 5.2, 5.2), *run("log", 3, 9.0, None),
        *run("t5", 1, 6.0, 9.0), *run("t5", 2, 6.4, 7.2),
        *run("alibi", 3, 8.0, 8.4),
    ]  # fmt: skip


def layout_of(found: list[Record], lost: tuple[RunFailure, ...] = ()) -> ComparisonTable:
    (layout,) = build_comparison_tables(found, lost)
    return layout


def test_a_cell_shows_its_number_of_seeds_if_others_have_more(holes: list[Record]) -> None:
    layout = layout_of(holes)
    assert {where: str(cell) for where, cell in layout.cells.items()} == {
        ("log", 64): "6.40 ± 2.25",
        ("log", 128): "5.60 ± 0.57 (n 2)*",
        ("t5", 64): "6.20 ± 0.28 (n 2)*",
        ("t5", 128): "8.10 ± 1.27 (n 2)",
        ("alibi", 64): "8.00 (n 1)",
        ("alibi", 128): "8.40 (n 1)",
    }
    assert "Cells are mean ± standard deviation of 3 seeds, or of n seeds where shown." in layout.notes
    assert "5.60 ± 0.57 (n 2)" in table_formats.render_comparison_markdown(layout)
    assert "5.60 ± 0.57 (n 2)*" in table_html(table_formats.build_html_table(layout))
    whole = [each for each in holes if each.method == "log" and each.seed < 3]
    assert "(n" not in table_formats.render_comparison_text(layout_of(whole)).replace("(n …)", "")


def test_a_change_is_over_the_seeds_that_have_both_lengths(holes: list[Record]) -> None:
    """A change uses the seeds with both lengths; log's third seed, with a high start, must not turn its change into a
    fall.
    """
    layout = layout_of(holes)
    assert layout.changes["log"].mean == pytest.approx(math.sqrt(6.0 / 5.0 * 1.0))
    assert str(layout.changes["log"]) == f"1.095 ×/÷ {math.exp(math.log(1.2) / math.sqrt(2)):.3f} (n 2)"
    assert str(layout.changes["alibi"]) == "1.050 (n 1)"
    assert (
        "computed per seed: geometric mean ×/÷ geometric standard deviation over the seeds with both"
        in table_formats.render_comparison_text(layout)
    )
    found = {each.method: each for each in verdict_tables.measure_extrapolation(layout)}
    for method in layout.methods:
        assert found[method].relative_changes == {128: pytest.approx(layout.changes[method].mean - 1)}
    grid = verdict_tables.build_extrapolation_table(layout)
    assert grid is not None
    assert dict(grid.rows)["log"][0] == "+9.5% (n 2)"
    assert "log 5.60 (n 2) (+9.5% from 64 tokens)" in page_of(holes)


def test_one_definition_of_change_gives_one_number(holes: list[Record]) -> None:
    """Changes between lengths and between methods use the geometric mean of ratios, in any order of averaging."""
    layout = layout_of([each for each in holes if each.seed < 3 and each.method != "alibi"])
    by_length = {method: layout.compute_change(method, 64, 128) for method in layout.methods}
    by_method = {each.x_value: each.change for each in compare_methods(layout, "log")}
    assert by_length["t5"].mean / by_length["log"].mean == pytest.approx(by_method[128] / by_method[64])
    back = layout.compute_change("t5", 128, 64)
    assert back is not None
    assert back.mean * by_length["t5"].mean == pytest.approx(1.0)
    gain = [each.replace(metric="delta_perplexity", change=None, change_from=None) for each in layout.records]
    (differences,) = build_comparison_tables(gain)
    change = differences.compute_change("t5", 64, 128)
    assert change is not None
    assert change.mean == pytest.approx((3.0 + 0.8) / 2)


def test_comparisons_use_paired_seeds_and_show_their_number(holes: list[Record]) -> None:
    layout = layout_of(holes)
    found = {(each.method, each.x_value): each for each in compare_methods(layout, "log")}
    t5 = found["t5", 64]
    assert (t5.num_seeds, t5.partial_num_seeds) == (2, None)
    assert t5.change == pytest.approx(math.sqrt(6.0 / 5.0 * 6.4 / 5.2))
    assert (found["alibi", 64].num_seeds, found["alibi", 64].partial_num_seeds) == (1, 1)
    assert ("alibi", 128) not in found, "the only seed of alibi is the one that log lacks there"
    grid = significance.build_significance_table(layout, "log")
    cells = dict(grid.rows)["alibi"]
    assert cells[0].endswith("(n 1)")
    assert cells[1] == "no seed in common"
    assert "Unless n is shown, 2 seeds are paired." in grid.notes
    assert "Ratio to log: geometric mean over the seeds that both methods have." in grid.notes


def test_an_order_is_compared_over_shared_seeds(holes: list[Record]) -> None:
    """Rankings compare shared seeds: by cells, log would rank behind t5 at 64 tokens because of a seed that t5
    lacks.
    """
    layout = layout_of(holes)
    assert layout.cells["log", 64].mean > layout.cells["t5", 64].mean
    theirs = PublishedTable("A paper", 512, "perplexity", (512,), {"log": (3.0,), "t5": (4.0,)})
    (found,) = paper_experiment.compute_rank_agreement(theirs, layout)
    assert (found.tau, found.num_seeds) == (1.0, 2)
    assert dict(paper_experiment.build_published_tables(theirs, [layout])[0].rows)["order agreement τ"] == (
        "+1.00 [+1.00, +1.00] (n 2)",
    )
    apart = PublishedTable("A paper", 512, "perplexity", (512,), {"t5": (3.0,), "alibi": (4.0,)})
    assert paper_experiment.compute_rank_agreement(apart, layout) == []


def test_missing_results_are_listed(holes: list[Record]) -> None:
    grid = results_output.build_missing_table([layout_of(holes)])
    assert grid is not None
    assert grid.rows == (
        ("log", ("3", "128 tokens", "no record")),
        ("t5", ("3", "all results", "no record")),
        ("alibi", ("1, 2", "all results", "no record")),
    )
    page = page_of(holes)
    assert '<h2 id="section-1-missing">Missing results</h2>' in page
    assert "128 tokens" in page
    console = Console(record=True, width=200)
    results_output.print_comparison_tables(console, holes)
    assert "Missing results" in console.export_text()


def test_maximum_lengths_and_trivial_baselines_are_not_missing_results(holes: list[Record]) -> None:
    whole = [each for each in holes if each.seed == 1]
    limited = [*whole, record("learned", 64, 5.0, max_length=64, target_digest="d")]
    floor = [record("floor: a guess", n, 4.0, seed=0, run=None, target_digest="d") for n in (64, 128)]
    assert results_output.build_missing_table(build_comparison_tables([*limited, *floor])) is None
    assert "Missing results" not in page_of([*limited, *floor])


def test_methods_with_one_seed_each_need_not_share_it(holes: list[Record]) -> None:
    """Two single-seed runs compared side by side need not share their seed."""
    two = [*run("log", 1, 5.0, 6.0), *run("t5", 2, 6.0, 9.0)]
    assert results_output.build_missing_table(build_comparison_tables(two)) is None
    grid = results_output.build_missing_table(build_comparison_tables(two[:-1]))
    assert grid is not None
    assert grid.rows == (("t5", ("2", "128 tokens", "no record")),)


def test_lengths_are_paired_within_a_run() -> None:
    """Lengths are paired within a run: two runs with the same seed and name are two rows."""
    twice = [each.replace(run=place) for place, end in (("a", 6.0), ("b", 9.0)) for each in run("log", 1, 5.0, end)]
    layout = layout_of(twice)
    for name, expected in (("log [a]", 6.0 / 5.0), ("log [b]", 9.0 / 5.0)):
        change = layout.compute_change(name, 64, 128)
        assert change is not None
        assert change.mean == pytest.approx(expected)


def test_a_failed_run_appears_in_table_page_picture_and_statistics(holes: list[Record]) -> None:
    lost = (DIVERGED, RunFailure("t5", 3, "killed by signal 9"))
    layout = layout_of(holes, lost)
    lines = table_formats.render_comparison_text(layout).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("gone")]
    assert row == ["gone", "failed", "failed", "failed"]
    grid = results_output.build_missing_table([layout])
    assert grid is not None
    assert ("t5", ("3", "all results", "failed: killed by signal 9")) in grid.rows
    assert ("gone", ("1", "all results", "failed at step 1,200: the loss is not finite")) in grid.rows
    assert dict(significance.build_significance_table(layout, "log").rows)["gone"] == ("failed", "failed")
    verdicts = verdict_tables.build_extrapolation_table(layout)
    assert verdicts is not None
    assert dict(verdicts.rows)["gone"] == ("–", "–", "failed")
    page = report.render_report([ReportSection(None, holes, failures=lost)])
    assert "failed at step 1,200: the loss is not finite" in page
    assert not any(each.method == "gone" for each in compare_methods(layout, "log"))


def test_a_failed_method_is_in_tables_of_its_training_length_alone(holes: list[Record]) -> None:
    found = [*holes, record("log", 128, 4.0, train_length=128, target_digest="d")]
    short, long_ = build_comparison_tables(found, [RunFailure("gone", 1, "why", train_length=128)])
    assert "gone" not in short.methods
    assert long_.methods == ("log", "gone")
    (grid,) = verdict_tables.build_train_length_tables([short, long_])
    assert ("gone", ("128", "failed", "failed")) in grid.rows


def test_failures_are_stored_next_to_results_and_reported(holes: list[Record], tmp_path: Path) -> None:
    write_results(tmp_path, holes, [DIVERGED])
    assert read_failures(tmp_path / "results.json") == [DIVERGED]
    assert "| gone | failed | failed | failed |" in (tmp_path / "results.md").read_text()
    assert "failed at step 1,200" in (tmp_path / "results.md").read_text()
    console = Console(record=True, width=200)
    combine_results([tmp_path, tmp_path / "results.failures.json"], console, output=tmp_path / "page.html")
    assert "failed at step 1,200" in console.export_text()
    assert "failed at step 1,200" in (tmp_path / "page.html").read_text()
    write_results(tmp_path, holes)
    assert not (tmp_path / "results.failures.json").exists(), "all members have run since"
    assert records.read_records(tmp_path / "results.json") == holes


def test_failures_remain_until_their_run_has_a_result(holes: list[Record], tmp_path: Path) -> None:
    elsewhere = RunFailure("t5", 3, "the loss is not finite", run="runs/t5/seed_3")
    write_results(tmp_path, holes, [DIVERGED, elsewhere])
    others = [*run("none", 1, 6.0, 7.0), *(each.replace(run="runs/other/seed_3") for each in run("t5", 3, 6.0, 7.0))]
    results_output.merge_into_results(tmp_path, others, same_run=False)
    assert read_failures(tmp_path / "results.json") == [DIVERGED, elsewhere]
    assert "| gone | failed | failed | failed |" in (tmp_path / "results.md").read_text()
    retrained = [each.replace(run="runs/t5/../t5/seed_3") for each in run("t5", 3, 6.0, 7.0)]
    results_output.merge_into_results(tmp_path, [*retrained, *run("gone", 1, 6.0, 7.0)], same_run=False)
    assert read_failures(tmp_path / "results.json") == []


@pytest.mark.parametrize(
    "text", ["{}", "no JSON", "[1]", '[{"method": "a", "seed": "1", "reason": "x"}]', '[{"method": "a"}]']
)
def test_an_invalid_list_of_failures_is_rejected(text: str, holes: list[Record], tmp_path: Path) -> None:
    path = records.write_records(tmp_path / "results.json", holes)
    get_failures_path(path).write_text(text)
    with pytest.raises(UserError, match=r"results\.failures\.json: not a list of failed runs"):
        combine_results([path], Console(record=True))
    with pytest.raises(UserError, match="not a list of failed runs"):
        write_results(tmp_path, holes)
    assert get_failures_path(path).read_text() == text, "somebody's own file"


def test_trivial_baselines_are_never_marked_as_best() -> None:
    shared = {"metric": "accuracy", "train_length": 40, "protocol": "task", "target_digest": "d"}
    found = [record("rotary", n, 0.5, seed, **shared) for n in (40, 80) for seed in (1, 2)]
    found += [record("cdape", n, 0.6, seed, **shared) for n in (40, 80) for seed in (1, 2)]
    found += [record("floor: a guess", n, 0.9, 0, run=None, **shared) for n in (40, 80)]
    layout = layout_of(found)
    assert {where for where, cell in layout.cells.items() if cell.is_best} == {("cdape", 40), ("cdape", 80)}
    assert str(layout.cells["floor: a guess", 40]) == "90.00", "it has no seeds that others could have more of"
    assert not {each.method for each in compare_methods(layout, "rotary")} & set(layout.trivial_baselines)
    assert [name for name, _ in significance.build_significance_table(layout, "rotary").rows] == ["cdape"]
    alone = [each for each in found if each.method != "rotary"]
    assert not any(cell.is_best for cell in layout_of(alone).cells.values()), (
        "better than a floor is not best of several"
    )
    other = [each.replace(train_length=20) for each in found]
    (grid,) = verdict_tables.build_train_length_tables(build_comparison_tables([*found, *other]))
    assert all("*" not in cell for name, cells in grid.rows if name.startswith("floor") for cell in cells)


def test_a_page_is_built_from_any_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is built from any records: methods without common lengths, tables without a visible method, and only
    floors.
    """
    monkeypatch.setattr(plots, "render_plots_png", lambda found, **_: b"")
    change = {"change": 1.2, "change_low": 1.1, "change_high": 1.3, "change_from": 64}
    same = {"run": "runs/a", "target_digest": "d"}
    found = [
        record("a", 64, 5.0, **same), record("a", 128, 6.0, **same, **change), record("b", 128, 6.5, **same, **change),
        record("floor: guess", 64, 9.0, seed=0, run=None, train_length=32, target_digest="d"),
        *(record(name, 64, 0.5, metric="accuracy", axis="depth", place=place)
          for name in ("b", "c") for place in (0.0, 1.0)),
    ]  # fmt: skip
    (reported, *_) = build_comparison_tables(found)
    assert results_output.describe_changes(reported) == [
        "a rises from 5.00 at 64 tokens to 6.00 at 128 tokens (+20.0%)."
    ]
    for leaderboard in (None, Leaderboard("a", (Ablation("b", "b", "a"),), 1)):
        records.write_records(tmp_path / "results.json", found)
        paper_experiment.write_experiment(tmp_path / "results.json", Experiment("All", leaderboard=leaderboard))
        for name in ("page.html", "page.md", "page.tex"):
            combine_results([tmp_path], Console(quiet=True), output=tmp_path / name)
