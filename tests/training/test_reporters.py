"""Destinations of records: files that continue, valid JSON numbers, missing packages."""

import importlib.util
import io
import json
import math
import os
import sqlite3
import subprocess
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import tiny_config

from megatron.config.schema import Config
from megatron.training.console import ConsoleReporter, format_train_record
from megatron.training.metrics_log import (
    UNREADABLE_FILE,
    DivergenceRecord,
    TrainRecord,
    ValidationRecord,
    compute_perplexity,
    list_scalars,
)
from megatron.training.reporters import JsonLines, TensorBoard, archive_damaged_lines, build_reporters
from megatron.utils.errors import RunError, UserError


def record(step: int, **keys: object) -> TrainRecord:
    values = {
        "step": step, "loss": 2.0, "perplexity": math.exp(2.0), "learning_rate": 1e-3, "grad_norm": 0.5,
        "tokens_per_second": 12345.6, "ms_per_step": 41.5, "tflops": 0.123, "mfu": None, "loss_scale": 1.0,
        "skipped_steps": 0, "memory_gib": 1.5, "tokens": 64 * step, "seconds_left": 125.0,
    }  # fmt: skip
    return TrainRecord(**{**values, **keys})


VALID = ValidationRecord(step=2, split="valid", loss=2.5, perplexity=math.exp(2.5), tokens=128, seconds=0.1)


def config(run: Path | None, **keys: object) -> Config:
    return tiny_config(Path("corpus"), run, **keys)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resumed_metrics_drop_rolled_back_steps(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = JsonLines(path, 0)
    for step in (1, 2, 3):
        first.report_training(record(step))
        first.report_validation(ValidationRecord(**{**VALID.__dict__, "step": step}))
    first.close()
    with open(path, "a") as file:
        file.write('{"kind": "train", "st')  # a crash in the middle of a line
    second = JsonLines(path, 2)
    second.report_training(record(3, loss=1.0))
    second.close()
    assert [(r["kind"], r["step"]) for r in read(path)] == [
        ("train", 1), ("valid", 1), ("train", 2), ("valid", 2), ("train", 3)
    ]  # fmt: skip
    assert read(path)[-1]["loss"] == 1.0
    JsonLines(path, 0).close()  # a new run
    assert read(path) == []


def test_damaged_lines_are_kept_and_reported(tmp_path: Path) -> None:
    """Damaged lines between good ones or at the start are kept and reported; half a line at the end follows any
    crash.
    """
    path = tmp_path / "metrics.jsonl"
    assert archive_damaged_lines(tmp_path) == []
    reporter = JsonLines(path, 0)
    for step in (1, 2, 3):
        reporter.report_training(record(step))
    reporter.close()
    whole = path.read_text()
    path.write_text(whole + '{"kind": "train", "st')
    assert archive_damaged_lines(tmp_path) == []
    lines = whole.splitlines(keepends=True)
    path.write_text(lines[0][9:] + lines[1] + '{"kind": gar\u2028bage}\n' + lines[2])
    (reported,) = archive_damaged_lines(tmp_path)
    assert reported == f"{path}: lines 1, 3 cannot be read; moved to {tmp_path / UNREADABLE_FILE}"
    assert (tmp_path / UNREADABLE_FILE).read_text() == lines[0][9:] + '{"kind": gar\u2028bage}\n'
    JsonLines(path, 3).close()
    assert path.read_text() == lines[1] + lines[2]


def test_json_has_no_infinity(tmp_path: Path) -> None:
    reporter = JsonLines(tmp_path / "metrics.jsonl", 0)
    reporter.report_training(record(1, loss=None, perplexity=math.inf, grad_norm=math.nan))
    reporter.close()
    (values,) = read(tmp_path / "metrics.jsonl")
    assert values["loss"] is values["perplexity"] is values["grad_norm"] is None
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written"):
        JsonLines(tmp_path / "file" / "metrics.jsonl", 0)


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    """Closing tries to write the last line again, and is no unexpected error either."""
    reporter = JsonLines(tmp_path / "metrics.jsonl", 0)
    reporter._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
    for work in (lambda: reporter.report_training(record(1)), reporter.close):
        with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written \(No space left on device\)$"):
            work()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = TensorBoard(str(tmp_path))
    for step in (1, 2):
        reporter.report_training(record(step, loss=3.0 - step))
    reporter.report_validation(VALID)
    reporter.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(2, 2.5)]
    assert "train/mfu" not in events.Tags()["scalars"]  # unknown
    assert "train/step" not in events.Tags()["scalars"]


def test_tensorboard_hides_the_steps_that_a_session_takes_again(tmp_path: Path) -> None:
    """A run without a checkpoint starts again at step 0, where nothing of the earlier session is kept."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = config(tmp_path / "run", use_tensorboard=True)
    for first_step, loss, shown in ((0, 1.0, [0, 1, 2, 3]), (2, 2.0, [0, 1, 2, 3, 4, 5]), (0, 3.0, [0, 1, 2, 3])):
        for reporter in build_reporters(chosen, first_step):
            for step in range(first_step + bool(first_step), first_step + 4):
                reporter.report_training(record(step, loss=loss))
            reporter.close()
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("train/loss")
        assert [event.step for event in events] == shown
        assert events[-1].value == loss


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, object]] = []
        self.metrics: dict[str, str | None] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, object]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Replacement of the package, because the real one starts a service."""
    fake = types.SimpleNamespace(inits=[], run=FakeRun(), Settings=dict)
    fake.init = lambda **keys: (fake.inits.append(keys), fake.run)[1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_is_offline_by_default_and_keeps_its_run(tmp_path: Path, wandb: types.SimpleNamespace) -> None:
    for mode in ("offline", "online"):
        chosen = config(
            tmp_path / "run", use_wandb=True, wandb_group="g", **({} if mode == "offline" else {"wandb_mode": mode})
        )
        reporters = build_reporters(chosen, 2)
        for reporter in reporters:
            reporter.report_training(record(1))
            reporter.report_validation(VALID)
            reporter.close()
        assert wandb.inits[-1]["mode"] == mode
    one, two = wandb.inits
    assert one["id"] == two["id"]
    assert one["project"] == "farfield"
    assert one["group"] == "g"
    assert one["config"]["num_layers"] == 2
    assert wandb.run.logged[0] == {"step": 1, **{f"train/{k}": v for k, v in list_scalars(record(1).to_dict()).items()}}
    assert (wandb.run.logged[1]["step"], wandb.run.logged[1]["valid/loss"]) == (2, 2.5)
    assert wandb.run.finished


def test_wandb_gets_a_new_run_without_rolled_back_steps(tmp_path: Path, wandb: types.SimpleNamespace) -> None:
    chosen, output = config(tmp_path / "run", use_wandb=True), []

    def report(first_step: int, *steps: int) -> list[tuple[object, object]]:
        wandb.run = FakeRun()
        reporters = build_reporters(chosen, first_step, output.append)
        for reporter in reporters:
            for step in steps:
                reporter.report_training(record(step, loss=float(10 * len(wandb.inits))))
            reporter.report_validation(ValidationRecord(**{**VALID.__dict__, "step": steps[-1]}))
            reporter.close()
        assert wandb.run.metrics == {"step": None, "*": "step"}
        return [(values["step"], values.get("train/loss", "valid")) for values in wandb.run.logged]

    assert report(0, 1, 2, 3) == [(1, 10.0), (2, 10.0), (3, 10.0), (3, "valid")]
    assert report(3, 4, 5) == [(4, 20.0), (5, 20.0), (5, "valid")]
    assert output == []
    assert report(4, 5) == [
        *((1, 10.0), (2, 10.0), (3, 10.0), (3, "valid"), (4, 20.0)),
        *((5, 30.0), (5, "valid")),
    ]
    assert output == ["use_wandb: discarding the steps after 4; Weights & Biases starts a new run without them"]
    one, two, three = (keys["id"] for keys in wandb.inits)
    assert one == two != three
    assert report(5, 6) == [(6, 40.0), (6, "valid")]
    assert wandb.inits[-1]["id"] == three
    assert report(0, 0, 1) == [(0, 50.0), (1, 50.0), (1, "valid")]
    assert report(0, 0) == [(0, 60.0), (0, "valid")]  # step 0 is evaluated again
    assert wandb.inits[-1]["id"] != wandb.inits[-2]["id"] != three


class FakeTrackioRun(FakeRun):
    def log(self, values: dict[str, object], step: int | None = None) -> None:
        print("* from Trackio")
        self.logged.append({"step": step, **values})

    def alert(self, **facts: object) -> None:
        self.logged.append(facts)


def test_trackio_is_local_continues_its_run_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inits: list[dict[str, object]] = []
    run = FakeTrackioRun()
    monkeypatch.setitem(
        sys.modules,
        "trackio",
        types.SimpleNamespace(init=lambda **keys: (print("*"), inits.append(keys), run)[2], finish=run.finish),
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    chosen, output = config(tmp_path / "run", use_trackio=True), []
    for first_step, steps in ((0, (1, 2)), (2, (3,)), (1, (2,))):
        reporters = build_reporters(chosen, first_step, output.append)
        for reporter in reporters:
            for step in steps:
                reporter.report_training(record(step))
            reporter.close()
    assert [values["step"] for values in run.logged] == [1, 2, 3, 1, 2]
    assert run.logged[0]["train/loss"] == 2.0
    one, two, three = inits
    assert one["name"] == two["name"] != three["name"]
    assert str(one["name"]).startswith("run-")
    assert {keys["space_id"] for keys in inits} == {None}
    assert output == ["use_trackio: discarding the steps after 1; Trackio starts a new run without them"]
    assert capsys.readouterr().out == ""
    for reporter in build_reporters(chosen, 2):
        reporter.report_divergence(DivergenceRecord(step=2, reason="the loss is not finite"))
    assert run.logged[-1] == {"title": "diverged", "text": "the loss is not finite", "step": 2}


@pytest.mark.slow
def test_trackio_itself_stores_the_numbers(tmp_path: Path) -> None:
    """The real package, if installed, in a process of its own because it reads TRACKIO_DIR on import."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tests/training', 'tests/support'];"
        "from test_reporters import *; folder = Path(sys.argv[1]);"
        "chosen = config(folder / 'run', use_trackio=True, use_tensorboard=False)\n"
        "for first, last in ((0, 2), (2, 3)):\n"
        "    for reporter in build_reporters(chosen, first):\n"
        "        [reporter.report_training(record(step, loss=float(step))) for step in range(first + 1, last + 1)]\n"
        "        reporter.report_validation(VALID); reporter.close()\n"
    )
    paths = os.pathsep.join(["tests/training", "tests/support", *filter(None, sys.path)])
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (database,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(database).execute("select step, metrics from metrics order by id").fetchall()
    losses = [(step, numbers["train/loss"]) for step, text in rows if "train/loss" in (numbers := json.loads(text))]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_packages_are_required_only_if_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for reporter in build_reporters(config(tmp_path / "run"), 0):
        reporter.close()
    with pytest.raises(UserError, match="use_wandb: wandb is not installed"):
        build_reporters(config(tmp_path / "run", use_wandb=True), 0)
    with pytest.raises(UserError, match="use_tensorboard: tensorboard is not installed"):
        build_reporters(config(tmp_path / "run", use_tensorboard=True), 0)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="use_trackio: trackio is not installed"):
        build_reporters(config(tmp_path / "run", use_trackio=True), 0)
    assert build_reporters(config(None, use_tensorboard=True), 0) == []  # no folder for output


def test_a_line_contains_the_relevant_metrics() -> None:
    line = format_train_record(record(50), 1000)
    assert line == (
        "step   50/1000  loss 2.0000  ppl 7.39  lr 1.00e-03  grad 0.50  12,346 tok/s  41.5 ms  123 GFLOP/s  "
        "1.50 GiB  2 min 05 s left"
    )
    line = format_train_record(
        record(1000, loss=None, perplexity=None, mfu=0.423, loss_scale=4096.0, skipped_steps=3), 1000
    )
    assert "loss –" in line
    assert "MFU 42.3%" in line
    assert "scale 4096" in line
    assert "skipped 3" in line
    assert "left" not in line
    line = format_train_record(record(50, loss=1e30, perplexity=1.5e304, grad_norm=3e38), 1000)
    assert "loss 1.00e+30  ppl 1.50e+304  lr 1.00e-03  grad 3.00e+38" in line


def test_a_pipe_gets_plain_lines_and_markup_is_not_read() -> None:
    stream = io.StringIO()
    reporter = ConsoleReporter(Console(file=stream, width=40), 10)
    reporter.begin(0)
    reporter.report_step(1)
    reporter.log("[red]a path with [brackets] and more than forty characters in one line")
    reporter.close()
    assert stream.getvalue() == "[red]a path with [brackets] and more than forty characters in one line\n"


def test_perplexity_never_fails() -> None:
    assert compute_perplexity(0.0) == 1.0
    assert compute_perplexity(1e4) == math.inf
    assert math.isnan(compute_perplexity(math.nan))
