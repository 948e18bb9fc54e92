"""Leaderboard: ranks, differences and costs compared with plain arithmetic, and text that follows the numbers."""

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from megatron.reports.combine import combine_results
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Ablation, Leaderboard, LeaderboardReport
from megatron.reports.leaderboard_benchmarks import RankedBenchmark
from megatron.reports.leaderboard_summary import annotate_points, build_answers, clamp_to_axes, find_frontier
from megatron.reports.metrics import get_metric
from megatron.reports.paper_experiment import Experiment, write_experiment
from megatron.reports.records import Record, record_from_row, write_records
from megatron.reports.report import ReportSection, render_report
from megatron.reports.run_records import RunFailure
from megatron.reports.significance import (
    apply_holm_correction,
    compare_pairs,
    get_seed_variances,
    list_pairs_with_best,
)
from megatron.reports.uncertainty import find_detectable_difference
from megatron.utils.errors import UserError

BLOCKS, TOKENS = 40, 64
BOARD = Leaderboard("rotary", (Ablation("cdape", "cdape+alibi", "alibi"), Ablation("cdape", "cdape+fox", "fox")), 2)


def text(method: str, means: tuple[float, float], seed: int = 1, step: float = 0.1, **more: object) -> list[Record]:
    """Build a run's records at 64 and 2,048 tokens: losses of blocks around a mean, with the same hard blocks for
    all.
    """
    hardness = np.random.default_rng(0).normal(0, 0.4, BLOCKS)
    noise = np.random.default_rng([seed, len(method), ord(method[0])])
    records = []
    for length, mean in zip((64, 2048), means, strict=True):
        sums = (mean + hardness - hardness.mean() + noise.normal(0, 0.01, BLOCKS)) * TOKENS
        nll = float(sums.sum() / (BLOCKS * TOKENS))
        change = {} if length == 64 else {"change": math.exp(nll - records[0].nll), "change_from": 64}
        records.append(
            Record(
                method=method,
                train_length=64,
                length=length,
                protocol="last",
                metric="perplexity",
                tokens=2560,
                value=math.exp(nll),
                nll=nll,
                seed=seed,
                block_sums=sums.tolist(),
                target_digest="d",
                dataset="python",
                run=f"runs/{method}/{seed}",
                parameters=1000,
                step_seconds=step,
                seconds=step * length,
                **change,
                **more,
            )
        )
    return records


def task(method: str, value: float, seed: int = 1, metric: str = "mean_accuracy", name: str = "copy") -> Record:
    run = {} if method.startswith("floor") else {"run": f"runs/{method}/{seed}"}
    row = {"method": method, "train_length": 8, "length": 32, "protocol": "task", "dataset": f"task {name}"}
    return record_from_row({**row, metric: value, "tokens": 50, "seed": seed, **run})


def records() -> list[Record]:
    """Records in which rotary diverges, cdape improves alibi with two seeds, and has no effect on fox."""
    return [
        *text("rotary", (1.50, 3.2)),
        *text("alibi", (1.60, 1.61), 1), *text("alibi", (1.61, 1.62), 2),
        *text("cdape+alibi", (1.50, 1.50), 1, 0.15), *text("cdape+alibi", (1.51, 1.51), 2, 0.15),
        *text("fox", (1.55, 1.57)), *text("cdape+fox", (1.55, 1.57), step=0.2),
        task("rotary", 0.3), task("alibi", 0.5), task("cdape+alibi", 0.9), task("fox", 0.9), task("floor: guess", 0.4),
    ]  # fmt: skip


def board_of(found: list[Record], failures: tuple[RunFailure, ...] = ()) -> LeaderboardReport:
    return LeaderboardReport(BOARD, build_comparison_tables(found, failures))


def test_ties_share_ranks_and_missing_numbers_are_last() -> None:
    accuracy = RankedBenchmark(
        "tasks", "copy", get_metric("accuracy"), {"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.1}, {}, frozenset("abcd")
    )
    assert accuracy.rank_methods("abcde") == {"a": 2.5, "b": 1, "c": 2.5, "d": 4, "e": 5}
    assert accuracy.rank_methods("befg") == {"b": 1, "e": 3, "f": 3, "g": 3}
    perplexity = RankedBenchmark("text", "", get_metric("perplexity"), {"a": 4.0, "b": 30.0}, {}, frozenset("ab"))
    assert perplexity.rank_methods("ab") == {"a": 1, "b": 2}


def test_a_kind_counts_once_however_many_tasks_it_has() -> None:
    more = [task(m, v, name=f"task{i}") for i in range(3) for m, v in (("rotary", 0.9), ("alibi", 0.1))]
    board = board_of([*text("rotary", (1.5, 3.2)), *text("alibi", (1.5, 1.6)), *more])
    assert board.ranks == {"rotary": {"text": 2, "tasks": 1}, "alibi": {"text": 1, "tasks": 2}}
    assert next(ranked_benchmark.title for ranked_benchmark in board.ranked_benchmarks) == "perplexity at 32×"


def test_a_needle_map_is_ranked_by_its_accuracy_or_else_by_effective_length() -> None:
    texts = [*text("rotary", (1.5, 3.2)), *text("alibi", (1.5, 1.6))]
    lengths = [task("rotary", 16.0, metric="effective_length"), task("alibi", 32.0, metric="effective_length")]
    board = board_of([*texts, *lengths])
    assert [ranked_benchmark.kind for ranked_benchmark in board.ranked_benchmarks] == ["text", "needles"]
    assert [board.ranks[method]["needles"] for method in ("rotary", "alibi")] == [2, 1]
    accuracies = [task("rotary", 0.9), task("alibi", 0.8)]
    found = [*lengths, *accuracies]
    board = board_of([*texts, *(each.replace(protocol="depths") for each in found)])
    assert [column.title for column in board.ranked_benchmarks] == ["perplexity at 32×", "copy, % beyond training"]
    assert [board.ranks[method]["needles"] for method in ("rotary", "alibi")] == [1, 2]


def test_a_page_corrects_all_its_tests_together() -> None:
    """Ablations are one family and all pairs another; each has half of the 5%."""
    found = [
        each
        for seed, noise in enumerate((0.0, 0.02, -0.01))
        for each in (
            *text("rotary", (1.50, 3.2 + 3 * noise), seed),
            *text("alibi", (1.60 + noise, 1.61 - noise), seed),
            *text("cdape+alibi", (1.50 - noise, 1.50), seed),
        )
    ]
    board = board_of(found)
    table = next(table for table in build_comparison_tables(found) if table.metric.name == "perplexity")
    planned = compare_pairs(table, [("cdape+alibi", "alibi", x) for x in (64, 2048)])
    pairs = compare_pairs(table, list_pairs_with_best(table, 2048))
    assert (len(planned), len(pairs), board.num_tests) == (2, 3, {"planned": 2, "pairs": 3})
    holm = apply_holm_correction([each.p for each in planned.values()])
    for (_, _, x), corrected in zip(planned, holm, strict=True):
        (shown,) = board.ablations[x].values()
        assert shown.holm_p == pytest.approx(min(1, 2 * corrected))
    holm = apply_holm_correction([each.p for each in pairs.values()])
    assert set(board.against_best) == {"rotary", "alibi"}
    for (method, against, _), corrected in zip(pairs, holm, strict=True):
        if against == "cdape+alibi":
            assert board.against_best[method].holm_p == pytest.approx(min(1, 2 * corrected))


def test_a_rank_has_the_interval_that_other_seeds_might_give() -> None:
    """Methods with overlapping seeds share an interval of ranks; clearly separate methods have none."""
    found = [
        each
        for seed, noise in enumerate((0.0, 0.05, -0.04))
        for method, mean in (("alibi", 1.60), ("fox", 1.601), ("rotary", 3.2))
        for each in text(method, (1.5, mean + noise * (-1 if method == "fox" else 1)), seed)
    ]
    rows = dict(board_of(found).build_tables()[0].rows)
    assert [cells[0] for cells in rows.values()] == ["1 (1–2)", "2 (1–2)", "3"]
    assert list(rows)[2] == "rotary"
    single = dict(board_of(records()).build_tables()[0].rows)
    assert single["fox"][0].isdigit(), "with one seed no interval is claimed"


def test_the_change_that_the_tests_detect_is_stated() -> None:
    found = [
        each
        for seed in range(5)
        for index, method in enumerate(("alibi", "fox", "rotary"))
        for each in text(method, (1.5, 1.6 + index), seed)
    ]
    board = board_of(found)
    change = board.find_detectable_change(2048)
    variances = get_seed_variances(board.text, 2048).values()
    middle = sorted(variances, key=lambda each: each.variance)[1]
    assert math.log1p(change) == pytest.approx(find_detectable_difference(middle, 5, 0.05 / 3, 0.8))
    assert "With 5 seeds per method, these tests detect a difference of " in " ".join(build_answers(board)[0].sentences)
    assert board_of(text("rotary", (1.5, 3.2))).find_detectable_change(2048) is None


def test_no_detectable_change_is_stated_for_two_seeds_of_many_methods() -> None:
    """With one degree of freedom only absurd differences are found: thousands of percent, or beyond every float."""
    rng = np.random.default_rng(0)
    found = [
        each for seed in (1, 2) for index in range(12) for each in text(f"m{index:02}", (1.5, 1.6 + rng.random()), seed)
    ]
    board = board_of(found)
    assert board.num_tests["pairs"] == 66
    assert board.find_detectable_change(2048) is None
    assert "these tests" not in " ".join(build_answers(board)[0].sentences)


def test_blocks_of_text_make_no_difference_significant() -> None:
    """Blocks of text are not samples of seeds: each seed's blocks differ significantly, but not over seeds."""
    found = [
        each
        for seed, shift in enumerate((0.01, 0.02, 0.09))
        for each in (*text("a", (1, 1.0), seed), *text("b", (1, 1.0 + shift), seed))
    ]
    board = board_of(found)
    comparison = board.against_best["b"]
    blocks = [
        np.array(b.block_sums) - np.array(a.block_sums)
        for a, b in zip(*([r for r in found if (r.method, r.length) == (m, 2048)] for m in "ab"), strict=True)
    ]
    assert stats.ttest_1samp(np.mean(blocks, axis=0), 0.0).pvalue < 1e-6
    values = np.array([[r.value for r in found if (r.method, r.length) == (m, 2048)] for m in "ab"])
    raw = stats.ttest_rel(*np.log(values)).pvalue
    assert (comparison.p, comparison.verdict) == (pytest.approx(raw), "not significant")
    holds = " ".join(build_answers(board)[0].sentences)
    assert "In the only test over seeds, the other method is not significantly worse (b +" in holds
    assert dict(board.build_tables()[0].rows)["b"][-1].startswith("(+")


def test_sentences_follow_from_the_numbers() -> None:
    board = board_of(records())
    holds, adds, costs = (" ".join(answer.sentences) for answer in build_answers(board))
    assert "For 4 of 5 methods" in holds
    assert "cdape+alibi, cdape+fox, fox and alibi" in holds
    assert "cdape+alibi has the lowest mean perplexity at 32×, 4.5" in holds
    assert "In the only test over seeds, the other method is significantly worse (alibi)." in holds
    assert ": cdape+alibi and fox, with 90.00; 3 of 4 beat the best trivial baseline (40.00%)" in holds
    assert (
        "At 32× adding a processor or temperature significantly lowers perplexity in 1 of 1 cases (cdape on alibi -10."
        in adds
    )
    assert (
        "Relative to rotary, cdape+alibi, the best at 32×, takes 1.50 times as long per training step, takes 1.50 "
        in costs
    )
    effects = dict(board.build_tables()[1].rows)
    assert effects["cdape on alibi"][2:] == ("1.50×", "1.50×")
    assert effects["cdape on fox"][2:] == ("2.00×", "2.00×")
    assert "Every method whose mean perplexity at 32× is within 5% of the lowest is more than 10% slower than" in costs
    # With the numbers of methods exchanged, every sentence is reversed.
    swap = {"cdape+alibi": "alibi", "alibi": "cdape+alibi", "rotary": "fox", "fox": "rotary"}
    turned = board_of([r.replace(method=swap.get(r.method, r.method)) for r in records()])
    holds, adds, _ = (" ".join(answer.sentences) for answer in build_answers(turned))
    assert "alibi has the lowest mean perplexity at 32×" in holds
    assert (
        "At 32× adding a processor or temperature significantly raises perplexity in 1 of 1 cases (cdape on alibi +11."
        in adds
    )


def test_a_method_may_be_in_two_ablations() -> None:
    """A method may appear in two ablations.

    cdape+alibi adds cdape to alibi, and alibi (treated as a temperature) to cdape; each has its own row.
    """
    found = [*text("alibi", (1.6, 1.6)), *text("cdape", (1.4, 1.4)), *text("cdape+alibi", (1.5, 1.5))]
    ablations = (Ablation("cdape", "cdape+alibi", "alibi"), Ablation("alibi", "cdape+alibi", "cdape"))
    table = LeaderboardReport(Leaderboard("alibi", ablations), build_comparison_tables(found)).build_tables()[1]
    assert [(name, cells[1][:2]) for name, cells in table.rows] == [("cdape on alibi", "-9"), ("alibi on cdape", "+1")]


def test_a_task_name_has_options_if_needed_to_distinguish_it() -> None:
    methods, names = ("a", "b"), ("copy(letters=2)", "copy(letters=8)", "sort(width=3)")
    found = [task(method, 0.5, name=name).replace(target_digest=name) for method in methods for name in names]
    board = board_of(found)
    titles = [ranked_benchmark.title.partition(",")[0] for ranked_benchmark in board.ranked_benchmarks]
    assert sorted(titles) == ["copy(letters=2)", "copy(letters=8)", "sort"]


def test_models_on_cpus_are_charged_the_seconds_of_processors() -> None:
    """CPU runs are charged processor seconds: concurrent runs made cdape+alibi appear ten times as long.

    GPUs use wall time.
    """
    for device, expected in (("cpu", 1.5), ("NVIDIA A100-SXM4-80GB", 15.0)):
        busy_message = [*text("rotary", (1.5, 3.2)), *text("cdape+alibi", (1.5, 1.5), step=1.5)]
        found = [
            r.replace(device=device, step_cpu_seconds=step, cpu_seconds=step * r.length)
            for r in busy_message
            for step in [0.1 if r.method == "rotary" else 0.15]
        ]
        cost = board_of(found).costs["cdape+alibi"]
        assert (cost.step, cost.scoring) == (pytest.approx(expected), pytest.approx(expected))
    some = [found[0].replace(device="cpu"), *(r.replace(device="cpu", cpu_seconds=None) for r in found[1:])]
    assert board_of(some).costs["cdape+alibi"].step == pytest.approx(15.0)  # different measures are not compared


def test_unknown_facts_are_not_claimed() -> None:
    """Records of other programs without block sums or times lead to no conclusions about them."""
    known = {"block_sums", "step_seconds", "seconds", "step_cpu_seconds", "cpu_seconds"}
    bare = [Record(**{k: v for k, v in r.model_dump().items() if k not in known}) for r in records()]
    holds, adds, costs = (" ".join(answer.sentences) for answer in build_answers(board_of(bare)))
    assert "the other method is significantly worse (alibi)." in holds  # seeds need no blocks
    assert "At 32× adding a processor or temperature significantly lowers perplexity in 1 of 1 cases" in adds
    assert costs == "Relative to rotary, cdape+alibi, the best at 32×, has as many parameters."
    rank = dict(board_of(bare).build_tables()[0].rows)
    assert rank["fox"][-1] == "(+7.5%)"


def test_costs_name_a_baseline_without_records() -> None:
    """Without its baseline, as in the first hours of a sweep, the table has no ratios and no column for them."""
    board = board_of([record for record in records() if record.method != "rotary"])
    costs = build_answers(board)[-1].sentences
    assert costs == ("Costs are relative to rotary, which has no results here.",)
    table = next(table for table in board.build_tables() if table.title == "Costs of methods")
    assert table.column_headers[0] == "parameters"
    assert not {"training step", "scoring at 32×"} & set(table.column_headers)
    assert "Times are omitted, because they are relative to rotary, whose times are unknown." in table.notes


def test_a_single_method_is_described() -> None:
    """A single method is described, as after the first run of a sweep."""
    board = board_of(text("rotary", (1.5, 3.2)))
    assert (board.ranking, board.ranked_benchmarks) == (["rotary"], [])
    assert "For 0 of 1 methods" in build_answers(board)[0].sentences[0]
    assert [table.title for table in board.build_tables()] == ["Costs of methods, relative to rotary"]
    tasks_alone = board_of([task("rotary", 0.5), task("alibi", 0.9)])
    assert (build_answers(tasks_alone), tasks_alone.ranking) == ([], ["alibi", "rotary"])
    assert "Leaderboard" in render_report(
        [ReportSection(None, [task("rotary", 0.5), task("alibi", 0.9)], leaderboard=BOARD)]
    )


def test_a_failed_method_is_listed_last() -> None:
    failed = RunFailure("gone", 1, "the loss is not finite", 7, 64)
    board = board_of(records(), (failed,))
    assert board.ranking[-1] == "gone"
    assert "No result at this length: gone." in " ".join(build_answers(board)[0].sentences)
    assert dict(board.build_tables()[0].rows)["gone"][-1] == "–"


def test_missing_results_state_the_maximum_length() -> None:
    ended = [record.replace(max_length=64) for record in text("learned", (1.6, 1.6)) if record.length == 64]
    reported = " ".join(build_answers(board_of([*records(), *ended]))[0].sentences)
    assert "learned cannot be evaluated at this length, because its maximum length is 64 tokens." in reported
    assert "Without a number" not in reported


def test_methods_with_fewer_seeds_are_marked() -> None:
    board = board_of(records())
    table = board.build_tables()[0]
    start, end = (table.column_headers.index(header) for header in ("perplexity at 1×", "perplexity at 32×"))
    rows = dict(table.rows)
    assert all(rows["fox"][index].endswith(" (n 1)") for index in (start, end))
    assert not any("(n " in cell for cell in rows["alibi"])
    assert any(note.startswith("n is the number of seeds ") for note in table.notes)
    assert "3 of the 5 methods have fewer than 2 seeds" in " ".join(build_answers(board)[0].sentences)


def test_a_picture_of_many_panels_is_described_in_two_sentences(tmp_path: Path) -> None:
    accuracies = [task(method, 0.5, metric="accuracy") for method in ("rotary", "alibi", "fox", "cdape+alibi")]
    write_records(tmp_path / "results.json", [*records(), *accuracies])
    write_experiment(tmp_path / "results.json", Experiment("All", "rotary", own_seeds=True, leaderboard=BOARD))
    combine_results([tmp_path], Console(quiet=True), output=tmp_path / "board.md")
    (line,) = (each for each in (tmp_path / "board.md").read_text().splitlines() if each.endswith("](board.png)"))
    assert "The tables below have every number." in line
    assert "Curves of perplexity per token and accuracy in % over length, of " in line
    assert len(line) < 300


def test_the_frontier_contains_undominated_methods() -> None:
    points = [("slow best", 3.0, 4.0), ("fast", 1.0, 6.0), ("beaten", 2.0, 6.5), ("middle", 2.0, 5.0)]
    assert find_frontier(points) == ["fast", "middle", "slow best"]


def test_html_and_markdown_pages_agree(tmp_path: Path) -> None:
    experiment = Experiment("All methods", "rotary", own_seeds=True, leaderboard=BOARD)
    write_records(tmp_path / "results.json", records())
    write_experiment(tmp_path / "results.json", experiment)
    combine_results([tmp_path], Console(quiet=True), output=tmp_path / "board.md")
    combine_results([tmp_path], Console(quiet=True), output=tmp_path / "board.md")  # its own page may be overwritten
    page, markdown = (
        render_report([ReportSection("All methods", records(), leaderboard=BOARD)]),
        (tmp_path / "board.md").read_text(),
    )
    for answer in build_answers(board_of(records())):
        assert answer.question in page
        assert answer.question in markdown
        for sentence in answer.sentences:
            assert sentence in page.replace("&#39;", "'")
            assert sentence in markdown.replace("\n", " ")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("board.png", "board_cost.png"))
    assert "Missing results" not in markdown
    prose = [line for line in markdown.splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, prose)) <= 118
    (tmp_path / "mine.md").write_text("# Mine\n")
    with pytest.raises(UserError, match=r"mine\.md"):
        combine_results([tmp_path], Console(quiet=True), output=tmp_path / "mine.md")
    for picture in ("other.png", "other_cost.png"):
        (tmp_path / picture).write_text("mine")
        with pytest.raises(UserError, match=rf"--output: .*{picture} exists and is not"):
            combine_results([tmp_path], Console(quiet=True), output=tmp_path / "other.md")
        assert (tmp_path / picture).read_text() == "mine"
        assert not (tmp_path / "other.md").exists()
        (tmp_path / picture).unlink()
    with pytest.raises(UserError, match="--title Mine: needs --output"):
        combine_results([tmp_path], Console(quiet=True), title="Mine")
    assert json.loads((tmp_path / "results.experiment.json").read_text())["leaderboard"]["baseline"] == "rotary"


def test_methods_without_results_in_a_benchmark_follow_without_a_rank() -> None:
    texts = [
        *text("rotary", (1.5, 3.2)),
        *text("fire", (1.5, 1.55)),
        *text("alibi", (1.6, 1.7)),
        *text("t5", (1.7, 2.5)),
    ]
    board = board_of([*texts, task("rotary", 0.5), task("alibi", 0.9)])
    assert board.ranking == ["alibi", "rotary", "fire", "t5"]
    assert board.ranks == {"alibi": {"text": 1, "tasks": 1}, "rotary": {"text": 2, "tasks": 2}}
    table = board.build_tables()[0]
    cells = dict(table.rows)
    assert [cells[name][0] for name in ("alibi", "rotary", "fire")] == ["1", "2", "–"]
    assert any("cover the 2 methods that every benchmark evaluated" in note for note in table.notes)


def test_further_evaluations_of_the_same_models_are_not_ranked() -> None:
    """A second evaluation of rotary's models would be the best method, and would shift every rank."""
    own = [each.replace(run=f"runs/rotary/{each.seed}") for seed in (1, 2) for each in text("yarn", (1.4, 1.4), seed)]
    more = [record.replace(method="rotary (yarn)") for record in own]
    rotary = [*text("rotary", (1.5, 3.2), 1), *text("rotary", (1.5, 3.1), 2)]
    alibi = [*text("alibi", (1.6, 1.7), 1), *text("alibi", (1.6, 1.8), 2)]
    board, without = board_of([*rotary, *more, *alibi]), board_of([*rotary, *alibi])
    assert (board.reevaluated, board.best_text_method) == ({"rotary (yarn)": "rotary"}, "alibi")
    assert (board.ranks, board.num_tests) == (without.ranks, without.num_tests)
    assert board.ranking == ["alibi", "rotary", "rotary (yarn)"]
    table = board.build_tables()[0]
    assert dict(table.rows)["rotary (yarn)"][0] == "–"
    expected = "Not ranked, because they evaluate the trained models of rotary with other options: rotary (yarn)."
    assert expected in table.notes
    first = build_answers(board)[0].sentences[0]
    assert first.startswith("For 0 of 2 methods")
    assert first.endswith("at the training length."), "none is the name of a method"


def test_columns_are_explained_above_the_table() -> None:
    table = board_of(records()).build_tables()[0]
    lead = " ".join(table.lead)
    assert "Perplexity is measured at the training length (1×, 64 tokens) and at 32×" in lead
    assert "difference in perplexity from cdape+alibi at 32×" in lead
    assert len(table.lead) <= 5
    page = render_report([ReportSection("A", records(), leaderboard=BOARD)])
    for shown in (table.to_text(), table.to_markdown(), page):
        assert shown.index(table.lead[0]) < shown.index("from the best at 32×")


def test_names_of_near_points_do_not_cover_each_other() -> None:
    figure = Figure(figsize=(4, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = {f"method_{index}": (1.0 + index / 1000, 7.0) for index in range(5)} | {"far": (2.0, 9.0)}
    for x, y in points.values():
        axes.plot([x], [y], marker="o")
    annotate_points(axes, points, font_size=7)
    names = [text for text in axes.texts if text.get_text()]
    assert {text.get_text() for text in names} == points.keys()
    boxes = [text.get_window_extent() for text in names]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert len(axes.texts) - len(names) == 4, "each moved name has a line to its point"


@pytest.mark.parametrize(
    ("point", "limited", "marker"),
    [
        ((1, 9), (1, 9), "o"),
        ((2, 10), (2, 10), "o"),
        ((3, 9), (2, 9), ">"),
        ((1, 11), (1, 10), "^"),
        ((3, 11), (2, 10), ">"),
    ],
)
def test_points_beyond_the_axes_are_drawn_at_their_ends(point, limited, marker) -> None:
    assert clamp_to_axes(point, (2, 10)) == (limited, marker)
