"""Curves of growing runs: lines read as they are written, restarted runs, and their display."""

import json
import os
import time
from pathlib import Path

import pytest
from tiny_runs import tiny_config

from megatron.launch.live_server import MAX_CURVES, MAX_POINTS, CurveReader, TrainingMonitor
from megatron.launch.run_status import read_status


def write_line(run: Path, step: int, loss: float | None, kind: str = "train", mode: str = "a") -> None:
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "metrics.jsonl", mode) as file:
        file.write(json.dumps({"kind": kind, "step": step, "loss": loss, "tokens_per_second": 100.0 + step}) + "\n")


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    reader = CurveReader(tmp_path)
    assert not reader.read()
    write_line(tmp_path, 10, 3.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert reader.read()
    assert reader.losses == [(10, 3.0)]
    # Earlier content is not read again, even if it changed.
    content = (tmp_path / "metrics.jsonl").read_bytes()
    with open(tmp_path / "metrics.jsonl", "r+b") as file:
        file.write(content.replace(b"3.0", b"9.0"))
        file.seek(0, 2)
        file.write(b'ep": 20, "loss": 2.5}\n{"kind": "valid", "step": 20, "loss": 2.75}\nno JSON\n[1]\n')
    reader.read()
    assert reader.losses == [(10, 3.0), (20, 2.5)]
    assert reader.validations == [(20, 2.75)]
    assert not reader.read()


def test_a_resumed_run_replaces_its_rolled_back_steps(tmp_path: Path) -> None:
    reader = CurveReader(tmp_path)
    for step in (10, 20, 30):
        write_line(tmp_path, step, 4 - step / 10)
    reader.read()
    write_line(tmp_path, 20, 1.5)
    reader.read()
    assert reader.losses == [(10, 3.0), (20, 1.5)]
    assert reader.speeds == [(10, 110.0), (20, 120.0)]
    # A shorter file means a restarted run.
    write_line(tmp_path, 5, 7.0, mode="w")
    reader.read()
    assert reader.losses == [(5, 7.0)]


def test_missing_losses_have_no_point(tmp_path: Path) -> None:
    reader = CurveReader(tmp_path)
    write_line(tmp_path, 10, None)
    write_line(tmp_path, 20, float("nan"))
    write_line(tmp_path, 30, float("inf"))
    write_line(tmp_path, 40, 2.0)
    reader.read()
    assert reader.losses == [(40, 2.0)]


def make_run(run: Path, steps: int) -> Path:
    for step in range(1, steps + 1):
        write_line(run, step, 5 / step)
    tiny_config(run, run, train_iters=steps).save(run / "config.yml")
    return run


def test_a_page_has_a_row_and_a_line_for_each_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name / "seed_1", steps) for name, steps in (("a", 3), ("b", 700))]
    section = TrainingMonitor().describe(runs)
    assert [name for name, _ in section.table.rows] == ["a/seed_1", "b/seed_1"]
    assert section.table.title == "Status of each run", "it stands below the heading Trainings"
    assert "MFU" not in section.table.column_headers, "it is not known of a CPU"
    assert section.table.rows[1][1][:2] == ("finished", "700/700")
    loss, speed = section.charts
    assert [line.name for line in loss.series] == ["a/seed_1", "b/seed_1"]
    assert len(loss.series[1].points) == MAX_POINTS
    assert loss.x_positions[loss.series[1].points[-1].x_index].text == "step: 700"
    assert speed.series[0].points[-1].value == 103.0
    # The first tenth of the steps may exceed the chart, whose upper limit is the loss of step 70.
    assert loss.scale.high < 5 / 70 * 1.1
    assert loss.series[0].points[0].value == 5.0, "what is above is told as it is"
    assert "up to 5.00" in loss.clip_note


def test_scores_of_tasks_are_curves(tmp_path: Path) -> None:
    """A chart for each metric has a line for each task; errors and counts are no scores."""
    reader = CurveReader(tmp_path)
    for step, score in ((0, 0.25), (10, 0.5), (20, 0.75)):
        write_line(tmp_path, step, 3.0)
        for task in ("piqa", "sciq"):
            values = {"acc": score, "acc_stderr": 0.01, "f1/strict": 2 * score, "requests": 7, "is_done": True}
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"kind": f"harness/{task}", "step": step, **values}) + "\n")
    reader.read()
    assert reader.task_values["acc", "piqa"] == [(0, 0.25), (10, 0.5), (20, 0.75)]
    _, accuracy, f1, _ = TrainingMonitor().describe([tmp_path]).charts
    assert [accuracy.title, f1.title] == ["Tasks: acc", "Tasks: f1/strict"]
    assert [line.name for line in accuracy.series] == ["piqa", "sciq"]
    assert [point.value for point in f1.series[1].points] == [0.5, 1.0, 1.5]
    write_line(tmp_path, 10, 3.0)
    reader.read()
    assert reader.task_values["acc", "piqa"] == [(0, 0.25)]


def test_runs_with_one_record_each_are_shown(tmp_path: Path) -> None:
    for name, value in (("a", 3.0), ("b", 3.5)):
        write_line(tmp_path / name, 20, value)
    for chart in TrainingMonitor().describe([tmp_path / "a", tmp_path / "b"]).charts:
        assert all(len(chart.list_shapes(series)["markers"]) == 1 for series in chart.series)
        assert [tick.text for tick in chart.ticks] == ["0", "5", "10", "15", "20"]


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        ([1], ["0", "1", "2", "3", "4", "5"]),
        ([10, 500], ["0", "100", "200", "300", "400", "500"]),
        ([4100, 4200], ["4,100", "4,120", "4,140", "4,160", "4,180", "4,200"]),
    ],
)
def test_the_axis_of_steps_begins_at_0_unless_all_are_late(steps: list[int], texts: list[str], tmp_path: Path) -> None:
    for step in steps:
        write_line(tmp_path, step, 3.0)
    chart, _ = TrainingMonitor().describe([tmp_path]).charts
    assert [tick.text for tick in chart.ticks] == texts


def test_runs_may_be_named_in_several_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(Path("a"), 2), make_run(tmp_path / "b", 2)]
    section = TrainingMonitor().describe(runs)
    assert [name for name, _ in section.table.rows] == ["a", "b"]
    monkeypatch.chdir("a")
    assert [name for name, _ in TrainingMonitor().describe([Path()]).table.rows] == ["a"]


def test_many_runs_are_shown_as_a_table_only(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{number:02}", 2) for number in range(MAX_CURVES + 1)]
    section = TrainingMonitor().describe(runs)
    assert len(section.table.rows) == MAX_CURVES + 1
    assert not section.charts
    assert f"at most {MAX_CURVES} runs" in section.table.notes[0]


def test_unusual_files_break_neither_page_nor_status(tmp_path: Path) -> None:
    """Unusual files break neither the page nor `status`: huge steps, terminal escapes, partial characters and idle
    pipes.
    """
    run = make_run(tmp_path / "odd", 2)
    with open(run / "metrics.jsonl", "a") as file:
        for step in ("1e999", "-1e999", "10" * 40, "true", "-1"):
            file.write(f'{{"kind": "train", "step": {step}, "loss": 1.0}}\n')
    reader = CurveReader(run)
    assert reader.read()
    assert [step for step, _ in reader.losses] == [1, 2]
    assert read_status(run).step == 2
    beat = {"pid": os.getpid(), "host": "elsewhere", "time": time.time(), "step": 2}
    (run / "heartbeat.json").write_text(json.dumps({**beat, "phase": "\x1b[2J\ud800"}))
    assert "\x1b" not in read_status(run).state
    (run / "heartbeat.json").unlink()
    os.mkfifo(run / "heartbeat.json")
    assert any("heartbeat.json" in problem for problem in read_status(run).problems)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert not CurveReader(run).read()
    assert TrainingMonitor().describe([run]).table.rows
