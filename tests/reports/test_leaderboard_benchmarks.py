"""Leaderboards with missing runs: only complete benchmarks are ranked, and missing runs are named."""

from dataclasses import replace
from pathlib import Path

from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Leaderboard, LeaderboardReport
from megatron.reports.leaderboard_benchmarks import LeaderboardPlan, count_tied_methods
from megatron.reports.leaderboard_summary import build_answers
from megatron.reports.paper_experiment import Experiment, read_experiment, write_experiment
from megatron.reports.records import Record, record_from_row
from megatron.reports.run_records import read_run_folder
from megatron.sweeps.results import save_experiment
from megatron.sweeps.spec import read_sweep

PLAN = LeaderboardPlan(("rotary", "alibi", "fox"), (1, 2), ("copy", "needles"))
BOARD = Leaderboard("rotary", plan=PLAN)
PERPLEXITIES = {"rotary": 9.0, "alibi": 5.0, "fox": 4.0}
ACCURACIES = {"rotary": 0.9, "alibi": 0.5, "fox": 0.1}


def text(method: str, seed: int) -> list[Record]:
    row = {"method": method, "train_length": 64, "protocol": "last", "tokens": 64, "target_digest": "d", "seed": seed}
    return [
        record_from_row({**row, "length": length, "perplexity": value, "run": f"runs/zoo/{method}/seed_{seed}"})
        for length, value in ((64, 4.0), (2048, PERPLEXITIES[method] + 0.01 * seed))
    ]


def copy(method: str, seed: int) -> list[Record]:
    row = {"method": method, "train_length": 8, "length": 32, "protocol": "task", "dataset": "task copy", "tokens": 9}
    run = f"runs/zoo/{method}/copy/seed_{seed}"
    return [record_from_row({**row, "mean_accuracy": ACCURACIES[method] + 0.01 * seed, "seed": seed, "run": run})]


def build(found: list[Record], board: Leaderboard = BOARD) -> LeaderboardReport:
    return LeaderboardReport(board, build_comparison_tables(found))


def list_runs(make: object, skipped: tuple[tuple[str, int], ...] = ()) -> list[Record]:
    pairs = [(method, seed) for method in PLAN.methods for seed in PLAN.seeds if (method, seed) not in skipped]
    return [record for pair in pairs for record in make(*pair)]  # type: ignore[operator]


def test_missing_runs_are_found_by_benchmark_method_and_seed() -> None:
    found = [*list_runs(text, (("fox", 2),)), *list_runs(copy)]
    everything = {method: [1, 2] for method in PLAN.methods}
    assert PLAN.list_missing_runs(found) == {"text": {"fox": [2]}, "needles": everything}
    assert replace(PLAN, benchmarks=("copy",)).list_missing_runs([*list_runs(text), *list_runs(copy)]) == {}


def test_a_benchmark_with_a_missing_run_is_shown_but_not_ranked() -> None:
    """The copies would put rotary first and fox last; without one of their runs, the text alone decides."""
    board = build([*list_runs(text), *list_runs(copy, (("fox", 2),))])
    table, missing, *_ = board.build_tables()
    assert board.ranking == ["fox", "alibi", "rotary"]
    assert board.ranks["rotary"] == {"text": 3}
    assert table.column_headers[3] == "copy, % beyond training (incomplete)"
    assert dict(table.rows)["fox"][3] == "11.00 (n 1)"
    missing_runs = "copy (5 of 6 runs), needles (0 of 6 runs)"
    assert table.lead[0] == f"Ranked benchmarks: text. Not ranked, because results are missing here: {missing_runs}."
    assert missing.title == "Missing runs"
    assert missing.rows == (("copy", ("1 of 6", "–", "fox (2)")), ("needles", ("6 of 6", "all methods", "–")))
    whole = build([*list_runs(text), *list_runs(copy)], Leaderboard("rotary", plan=replace(PLAN, benchmarks=("copy",))))
    assert whole.ranks["rotary"] == {"text": 3, "tasks": 1}
    assert [table.title for table in whole.build_tables()] == ["Leaderboard", "Costs of methods"]
    assert not any("missing" in sentence for sentence in whole.build_tables()[0].lead)


def test_no_method_has_a_rank_if_no_benchmark_is_whole() -> None:
    board = build(list_runs(text, (("fox", 1), ("fox", 2))))
    table, missing, *_ = board.build_tables()
    assert {name: cells[0] for name, cells in table.rows} == {"alibi": "–", "rotary": "–"}
    assert list(dict(table.rows)) == ["alibi", "rotary"], "sorted by perplexity"
    assert table.lead[0].startswith("No benchmark is complete, so no method has a rank: text (4 of 6 runs), copy (0 of")
    assert missing.rows[0] == ("text", ("2 of 6", "fox", "–"))
    assert "Provisional, because 1 method has missing runs on the text." in build_answers(board)[0].sentences


def test_tied_methods_are_counted() -> None:
    assert count_tied_methods({"a": 0.5, "b": 0.5, "c": 0.25, "d": 1.0, "e": 1.0}) == 4
    tied = [record.replace(value=0.5) if record.method != "fox" else record for record in list_runs(copy)]
    notes = build([*list_runs(text), *tied], Leaderboard("rotary")).build_tables()[0].notes
    assert "Ties in copy, % beyond training: 2 of 3 methods share their score." in notes


def test_the_plan_is_saved_with_the_experiment(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    experiment = Experiment("A board", leaderboard=BOARD, num_runs=18)
    write_experiment(path, experiment)
    assert read_experiment(path) == experiment
    write_experiment(path, replace(experiment, leaderboard=Leaderboard("rotary")))
    assert read_experiment(path).leaderboard.plan is None


def test_the_shipped_leaderboard_has_a_plan_of_all_its_runs(tmp_path: Path) -> None:
    sweep = read_sweep(["quickstart", "zoo"], [f"sweep.records={tmp_path}"])
    save_experiment(sweep, dict.fromkeys(sweep.members, "digest"))
    experiment = read_experiment(tmp_path / "results.json")
    plan = experiment.leaderboard.plan
    assert plan.all_benchmarks == ("text", "niah", "flip_flop", "copy")
    assert len(plan.all_benchmarks) * plan.runs_per_benchmark == experiment.num_runs == len(sweep.members)
    folder = Path(__file__).resolve().parents[2] / "docs" / "results" / "zoo"
    published = read_experiment(folder / "results.json")
    outdated = "write it again: ./deepy.py sweep quickstart zoo"
    assert replace(published, run_digests=None) == replace(experiment, run_digests=None), outdated
    assert published.run_digests.keys() == experiment.run_digests.keys(), outdated
    assert read_run_folder(folder, published.run_digests).ignored_files == []
