"""Progress of a run, read from its files."""

import io
import json
import re
import socket
import time
from pathlib import Path

import pytest
from permissions import unprivileged, unreadable
from rich.console import Console
from tiny_runs import tiny_config

from megatron.checkpoint.run_folder import SWEEP_LOCK, RunLock
from megatron.launch import run_status as module
from megatron.launch.run_status import (
    RunStatus,
    build_status_table,
    find_runs,
    format_status_cells,
    print_status,
    read_status,
)
from megatron.utils.errors import UserError

RECORD = {"kind": "train", "step": 30, "loss": 2.5, "tokens_per_second": 1000.0, "mfu": 0.25, "seconds_left": 70.0}


def make(run: Path, **heartbeat: object) -> Path:
    run.mkdir(parents=True)
    tiny_config(run, run, train_iters=100).save(run / "config.yml")
    valid = {"kind": "valid", "step": 20, "loss": 2.75}
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (valid, RECORD)))
    (run / "checkpoints" / "step_0000020").mkdir(parents=True)
    if heartbeat:
        (run / module.HEARTBEAT_FILE).write_text(json.dumps(heartbeat))
    return run


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    found = read_status(make(tmp_path / "a"))
    assert (found.state, found.step, found.train_iters, found.checkpoint) == ("stopped", 30, 100, 20)
    assert (found.loss, found.valid_loss, found.mfu, found.seconds_left) == (2.5, 2.75, 0.25, None)


def test_a_run_with_an_unavailable_encoding_is_reported(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    text = (run / "config.yml").read_text().replace("train_iters: 100", "train_iters: 30")
    (run / "config.yml").write_text(re.sub(r"^pos_emb: \w+$", "pos_emb: my_own", text, flags=re.MULTILINE))
    assert "pos_emb: my_own" in (run / "config.yml").read_text()
    found = read_status(run)
    assert (found.state, found.train_iters, found.problems) == ("finished", 30, ())


def test_a_diverged_run_is_reported(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "diverged", "step": 33, "reason": "its loss is nan"}) + "\n")
    assert (read_status(run).state, read_status(run).step) == ("diverged", 33)


def test_an_imported_model_is_not_a_stopped_run(tmp_path: Path) -> None:
    """A folder with initial weights and no key of training was never trained; a killed run has such keys."""
    run = tmp_path / "imported"
    (run / "checkpoints" / "step_0000000").mkdir(parents=True)
    (run / "config.yml").write_text("num_layers: 1\npos_emb: rotary\n")
    assert (read_status(run).state, read_status(run).problems) == ("imported", ())
    (run / "config.yml").write_text("num_layers: 1\npos_emb: rotary\ntrain_iters: 5\n")
    assert read_status(run).state == "stopped"


def test_a_recent_heartbeat_means_alive(tmp_path: Path) -> None:
    found = read_status(make(tmp_path / "a", time=time.time(), step=35, phase="validate"))
    assert (found.state, found.phase, found.step, found.seconds_left) == ("validating", "validate", 35, 70.0)
    old = read_status(make(tmp_path / "b", time=time.time() - 100, step=35, phase="validate"))
    assert (old.state, old.phase, old.step) == ("stopped", None, 30)


def test_the_table_fits_80_columns_without_shortening_a_number() -> None:
    numbers = ("validating", "12,500/50,000", "10.2511", "11.0412", "123,456", "38%", "35 h 59 min", "12,000")
    status = RunStatus("runs/a/run/with/a/long/name", "validating", 12_500, 50_000, 10.25113, 11.04119, 123_456, 0.38,
                       36 * 3600 - 60, 12_000)  # fmt: skip
    file = io.StringIO()
    Console(file=file, width=80).print(build_status_table([status], 80))
    heading, first, *rest = file.getvalue().splitlines()
    assert max(map(len, (heading, first, *rest))) <= 80
    assert all(number in first for number in numbers)
    assert "".join(line.split()[0] for line in (first, *rest)) == status.run


def test_an_evaluation_of_tasks_has_a_state(tmp_path: Path) -> None:
    assert read_status(make(tmp_path / "a", time=time.time(), step=35, phase="harness")).state == "evaluating"


@pytest.mark.parametrize("phase", ["data", "reduce", "forward and backward", "step", "report"])
def test_a_run_within_a_step_is_training(tmp_path: Path, phase: str) -> None:
    found = read_status(make(tmp_path / "a", time=time.time(), step=35, phase=phase))
    assert (found.state, found.phase) == ("training", phase)


def test_the_lock_of_a_run_killed_on_this_machine_is_released_at_once(tmp_path: Path) -> None:
    beat = {"time": time.time(), "step": 35, "phase": "validate"}
    here = make(tmp_path / "here", host=socket.gethostname(), **beat)
    there = make(tmp_path / "there", host="another", **beat)
    for run in (here, there):
        lock = RunLock(run)
        assert read_status(run).state == "validating"
        lock.release()
    assert (read_status(here).state, read_status(there).state) == ("stopped", "validating")


def test_damaged_records_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": gar\n' + json.dumps({**RECORD, "step": 40}) + '\n{"kind": "tr')
    print_status([run], as_json=False)
    reported = capsys.readouterr().out
    assert "40/100" in reported
    assert f"note: {run}/metrics.jsonl: line 3 cannot be read\n" in reported


DEEP = "[" * 200_000
BROKEN = {
    "heartbeat.json": (DEEP, b"[1]", b"\xff", '{"time": 1e999, "step": 1' + "0" * 400 + "}"),
    "metrics.jsonl": (DEEP + "\n", '{"kind": "train", "step": 1e999, "loss": 1}\n', '{"kind": [], "step": "1"}\n'),
    "config.yml": ("a: " + "[" * 100, "train_iters: many\n", b"\xff"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_run_does_not_hide_others(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run has a line; unreadable files are reported by name and do not hide other runs."""
    whole = make(tmp_path / "runs" / "a")
    wrong = [make(tmp_path / "runs" / f"wrong{number}") for number, _ in enumerate(BROKEN[name])]
    for run, content in zip(wrong, BROKEN[name], strict=True):
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    print_status([tmp_path / "runs"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in found] == list(map(str, [whole, *wrong]))
    assert (found[0]["loss"], found[0]["problems"]) == (2.5, [])
    # A heartbeat with impossible numbers still counts; only an unreadable file is reported.
    reported_runs = [each for each, content in zip(found[1:], BROKEN[name], strict=True) if "time" not in str(content)]
    problems = [each["problems"] for each in reported_runs]
    assert all(len(each) == 1 and name in each[0] for each in problems), problems
    print_status([tmp_path / "runs"], as_json=False)
    reported = capsys.readouterr().out
    assert reported.count("note: ") == len(problems)


def test_missing_numbers_in_records_are_shown_as_unknown(tmp_path: Path) -> None:
    run = make(tmp_path / "a", time="now", step=[], host={})
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**RECORD, "step": 40, "loss": "low", "mfu": None, "tokens_per_second": 10**400}) + "\n")
    found = read_status(run)
    assert (found.step, found.loss, found.mfu, found.tokens_per_second, found.problems) == (40, None, None, None, ())
    assert build_status_table([found], 80).row_count == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "heartbeat.json", "config.yml", "checkpoints", ""])
def test_unreadable_files_are_reported_for_their_run_only(tmp_path: Path, name: str) -> None:
    whole, shut = (make(tmp_path / "runs" / each, time=time.time(), step=3) for each in "ab")
    with unprivileged(), unreadable(shut / name):
        runs = find_runs([tmp_path / "runs"])
        found = {each.run: each for each in map(read_status, runs)}
    assert (found[str(whole)].loss, found[str(whole)].problems) == (2.5, ())
    if name:
        (problem,) = found[str(shut)].problems
        assert problem.startswith(f"{shut / name}: ")
        assert "ermission denied" in problem


def test_a_starting_run_is_listed(tmp_path: Path) -> None:
    """A run that is still loading has only a log and the lock."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    lock = RunLock(run)
    (run / "log.txt").write_text("")
    assert find_runs([run]) == find_runs([tmp_path / "runs"]) == [run]
    assert (read_status(run).state, read_status(run).step) == ("starting", 0)
    lock.release()
    assert read_status(run).state == "stopped"


def test_a_lock_means_alive(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    lock = RunLock(run)
    assert read_status(run).state == "starting"
    lock.release()
    assert read_status(run).state == "stopped"


def test_status_lists_the_runs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make(tmp_path / "runs" / name) for name in ("b", "a")]
    (runs[0] / "checkpoints" / "step_0000020" / "config.yml").write_text("")
    assert find_runs([tmp_path / "runs"]) == sorted(runs)
    assert find_runs([runs[0], tmp_path / "runs"]) == runs
    print_status([tmp_path / "runs"], as_json=True)
    assert [each["run"] for each in json.loads(capsys.readouterr().out)] == [str(runs[1]), str(runs[0])]
    assert build_status_table([read_status(run) for run in runs], 80).row_count == 2


def test_a_submitted_job_is_listed_until_it_has_written_a_run(tmp_path: Path) -> None:
    waiting, sweep = tmp_path / "runs" / "waiting", tmp_path / "runs" / "sweep"
    for folder in (waiting, sweep):
        folder.mkdir(parents=True)
        (folder / "job.sbatch").touch()
    (waiting / "job.yml").write_text("train_iters: 200\n")
    status = read_status(waiting)
    assert (status.state, status.step, status.train_iters) == ("submitted", 0, 200)
    run = make(sweep / "a")
    assert find_runs([tmp_path / "runs"]) == [run, waiting]
    assert find_runs([sweep]) == [run]
    lock = RunLock(waiting)
    assert (read_status(waiting).state, find_runs([waiting])) == ("starting", [waiting])
    lock.release()


def test_unknown_facts_have_no_column(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    headers, rows = format_status_cells([read_status(run)])
    assert headers == ("state", "step", "loss", "valid", "tokens/s", "MFU", "saved"), "it does not train"
    assert len(rows[0]) == len(headers)
    (run / "metrics.jsonl").write_text(json.dumps({**RECORD, "mfu": None}) + "\n")
    assert format_status_cells([read_status(run)])[0] == ("state", "step", "loss", "tokens/s", "saved")
    both = [read_status(run), read_status(make(tmp_path / "b"))]
    headers, rows = format_status_cells(both)
    assert [cells[headers.index("MFU")] for cells in rows] == ["–", "25%"]


def test_following_prints_changes_until_all_runs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make(tmp_path / "runs" / name) for name in ("a", "b")]
    lock = RunLock(runs[0])

    def train(seconds: float) -> None:
        """Simulate the time between two looks: a step, then nothing, then the end."""
        looks.append(seconds)
        if len(looks) == 1:
            with open(runs[0] / "metrics.jsonl", "a") as file:
                file.write(json.dumps({**RECORD, "step": 77}) + "\n")
        elif len(looks) == 3:
            lock.release()

    looks: list[float] = []
    monkeypatch.setattr(module.time, "sleep", train)
    console = Console(file=io.StringIO(), width=300)
    assert print_status([tmp_path / "runs"], as_json=False, follow=True, console=console)
    assert len(looks) == 3
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [line.count("a starting") + line.count("a stopped") for line in lines] == [0, 1, 0, 1, 1]
    assert lines[0].startswith("run state step loss")  # not repeated
    assert sum(str(runs[1]) in line for line in lines) == 1, "what has not changed is not printed again"
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "diverged", "step": 80, "reason": "its loss is nan"}) + "\n")
    assert not print_status([tmp_path / "runs"], as_json=False, follow=True)


def test_nothing_is_truncated_without_a_terminal(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / ("deep" * 20) / "cdape" / "seed_1234")
    console = Console(file=io.StringIO(), width=80)
    assert print_status([run], as_json=False, console=console)
    header, line = console.file.getvalue().splitlines()
    assert line.startswith(f"{run}  stopped  30/100  2.5000")
    assert header.index("state") == line.index("stopped")
    terminal = Console(file=io.StringIO(), width=80, force_terminal=True)
    print_status([run], as_json=False, console=terminal)
    assert "…" not in terminal.file.getvalue()


def test_a_sweep_in_a_subfolder_is_followed(tmp_path: Path) -> None:
    """A sweep in a subfolder counts as alive; between two trainings none of its runs is active."""
    make(tmp_path / "runs" / "sweep" / "a" / "seed_1")
    assert not module.is_any_run_active([tmp_path / "runs"])
    lock = RunLock(tmp_path / "runs" / "sweep", name=SWEEP_LOCK, key="sweep.output")
    assert module.is_any_run_active([tmp_path / "runs"])
    assert module.is_any_run_active([tmp_path / "runs" / "sweep"])
    assert not module.is_any_run_active([tmp_path / "runs" / "sweep" / "a"])
    lock.release()


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no run"):
        find_runs([tmp_path])


def test_folders_of_other_programs_are_not_listed(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "ours")
    other = tmp_path / "runs" / "other"
    (other / "checkpoints" / "epoch=3").mkdir(parents=True)
    (other / "config.yml").write_text("trainer: {max_epochs: 3}\n")
    (other / "metrics.jsonl").write_text('{"epoch": 3, "loss": 0.5}\n')
    (other / "heartbeat.json").write_text("{}")
    assert find_runs([tmp_path / "runs"]) == [run]
    with pytest.raises(UserError, match="contains no run"):
        find_runs([other])
