"""Publishing the leaderboard: complete benchmarks only, from the files of runs."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron.reports.leaderboard import Leaderboard
from megatron.reports.leaderboard_benchmarks import LeaderboardPlan
from megatron.reports.paper_experiment import Experiment, write_experiment
from megatron.reports.records import Record, record_from_row
from megatron.reports.run_records import RunFailure, RunOutcome, get_run_file, read_failures, write_run_file
from megatron.utils.errors import UserError
from tools.docs.publish_leaderboard import publish, replace_cpu_times

PLAN = LeaderboardPlan(("rotary", "alibi"), (1, 2), ("copy",))


def write_runs(folder: Path, copies: int) -> None:
    """Write the runs of both methods on the text, and some of the copies."""
    folder.mkdir()
    runs = [(method, seed) for method in PLAN.methods for seed in PLAN.seeds]
    files = [get_run_file(folder, benchmark, *run) for benchmark in (None, *PLAN.benchmarks) for run in runs]
    digests = {file.relative_to(folder).as_posix(): "digest" for file in files}
    board = Leaderboard("rotary", plan=PLAN)
    experiment = Experiment("A board", differences=("Biases are shared.",), leaderboard=board, run_digests=digests)
    write_experiment(folder / "results.json", experiment)
    shared = {"train_length": 64, "tokens": 64, "parameters": 1000, "step": 5}
    for number, (method, seed) in enumerate(runs):
        run = f"runs/zoo/{method}/seed_{seed}"
        text: list[Record] = [
            record_from_row({**shared, "method": method, "length": length, "protocol": "last", "target_digest": "d",
                             "perplexity": 5.0 + number, "seed": seed, "run": run})
            for length in (64, 128)
        ]  # fmt: skip
        write_run_file(get_run_file(folder, None, method, seed), "digest", RunOutcome(text))
        if number < copies:
            task = {**shared, "length": 128, "protocol": "task", "dataset": "task copy", "seed": seed}
            found = [
                {**task, "method": method, "mean_accuracy": 0.5, "run": f"runs/zoo/{method}/copy/seed_{seed}"},
                {**task, "method": "floor: guess", "mean_accuracy": 0.1, "seed": 0},
            ]
            copy = [record_from_row(row) for row in found]
            write_run_file(get_run_file(folder, "copy", method, seed), "digest", RunOutcome(copy))


def write_costs(path: Path, ratios: dict[str, float]) -> None:
    """Write costs in which rotary takes half a second, and quartiles differ from the median."""
    times = {
        name: {"seconds": 0.5 if name == "rotary" else 9.0, "ratio": [0.8 * x, x, 2 * x]} for name, x in ratios.items()
    }
    record = {"baseline": "rotary", "length": 128, "step": times, "scoring": times}
    path.write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "metrics"), [(3, {"perplexity"}), (4, {"perplexity", "mean_accuracy"})])
def test_only_complete_benchmarks_are_published(tmp_path: Path, copies: int, metrics: set[str]) -> None:
    write_runs(tmp_path / "runs", copies)
    if copies == 4:
        write_costs(tmp_path / "zoo_costs.json", {"rotary": 1.0, "alibi": 0.9})
    publish(tmp_path / "runs", tmp_path, Console(quiet=True))
    rows = json.loads((tmp_path / "zoo.json").read_text(encoding="utf-8"))
    assert {metric for row in rows for metric in ("perplexity", "mean_accuracy") if metric in row} == metrics
    assert ("floor: guess" in {row["method"] for row in rows}) == (copies == 4)
    page = (tmp_path / "zoo.md").read_text(encoding="utf-8")
    assert page.splitlines()[1] == "# A board"
    assert page.index("\n- Biases are shared.\n") < page.index("## All numbers")
    assert page.count("Biases are shared") == 1
    assert ("took turns on one core (docs/results/zoo_costs.json)" in " ".join(page.split())) == (copies == 4)
    assert {row.get("step_cpu_seconds") for row in rows if "perplexity" in row} == (
        {0.5, 0.45} if copies == 4 else {None}
    )
    assert ("Not ranked, because results are missing here: copy (0 of 4 runs)" in page) == (copies == 3)
    assert (tmp_path / "zoo.html").is_file()
    assert (tmp_path / "zoo.png").is_file()


def test_runs_of_older_definitions_count_as_missing(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", 0)
    write_run_file(get_run_file(tmp_path / "runs", None, "alibi", 2), "older", RunOutcome([]))
    notes = io.StringIO()
    with pytest.raises(UserError, match=r"text \(3 of 4 runs\)"):
        publish(tmp_path / "runs", tmp_path, Console(file=notes))
    assert notes.getvalue().startswith("note: ")
    assert "alibi/seed_2.json.gz" in notes.getvalue()


@pytest.mark.slow
def test_a_diverged_run_is_published_and_not_missing(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", 0)
    failure = RunFailure("alibi", 2, "its loss is nan", 3, 64, run="runs/zoo/alibi/seed_2")
    write_run_file(get_run_file(tmp_path / "runs", None, "alibi", 2), "digest", RunOutcome(failure=failure))
    publish(tmp_path / "runs", tmp_path, Console(quiet=True))
    assert read_failures(tmp_path / "zoo.json") == [failure]
    page = (tmp_path / "zoo.md").read_text(encoding="utf-8")
    assert "Ranked benchmarks: text." in page
    assert "(n 1)" in next(line for line in page.splitlines() if line.startswith("| alibi"))


@pytest.mark.parametrize(("copies", "found"), [(0, "copy \\(0 of 4 runs\\)"), (4, "Ranked benchmarks: copy")])
def test_nothing_is_published_without_the_text(tmp_path: Path, copies: int, found: str) -> None:
    """Other pages quote perplexities of the published record."""
    write_runs(tmp_path / "runs", copies)
    get_run_file(tmp_path / "runs", None, "alibi", 2).unlink()
    with pytest.raises(UserError, match=rf"without all runs of the text.*{found}"):
        publish(tmp_path / "runs", tmp_path, Console(quiet=True))
    assert not (tmp_path / "zoo.json").exists()
    (tmp_path / "runs" / "results.experiment.json").unlink()
    with pytest.raises(UserError, match="no plan of a leaderboard"):
        publish(tmp_path / "runs", tmp_path, Console(quiet=True))


def test_costs_measured_in_turns_replace_those_of_the_runs(tmp_path: Path) -> None:
    """The ratio is the median over rounds, and another reading of a model keeps its ratio to the model's scoring."""
    write_costs(tmp_path / "costs.json", {"rotary": 1.0, "cdape": 1.5})

    def build(method: str, length: int, cpu_seconds: float, protocol: str = "last") -> Record:
        return record_from_row(
            {"method": method, "length": length, "protocol": protocol, "perplexity": 5.0, "train_length": 64, "seed": 1,
             "run": f"runs/zoo/{method.partition(' ')[0]}/seed_1", "tokens": 9, "windows": 4, "step_cpu_seconds": 7.0,
             "cpu_seconds": cpu_seconds}
        )  # fmt: skip

    given = [build("rotary", 64, 1.0), build("rotary", 128, 3.0), build("rotary (yarn)", 128, 6.0)]
    given += [build("cdape", 128, 8.0), build("copier", 128, 8.0, "task")]
    found = [(r.step_cpu_seconds, r.cpu_seconds) for r in replace_cpu_times(given, tmp_path / "costs.json")]
    assert found == [(0.5, 1.0), (0.5, 2.0), (0.5, 4.0), (0.75, 3.0), (7.0, 8.0)]
    with pytest.raises(UserError, match="no costs of 'fox'"):
        replace_cpu_times([build("fox", 128, 1.0)], tmp_path / "costs.json")
