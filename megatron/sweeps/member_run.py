"""One member of a sweep: its training, as a process of its own that is started, watched and ended, and its evaluation.

The process is `./deepy.py train FILE`, so no run inherits another's state, and any can be repeated by hand.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megatron.launch.child_command import DEEPY, build_command_error, stop_child
from megatron.reports.records import Record
from megatron.sweeps.remaining_work import (
    MemberWork,
    find_finished_step,
    lacks_test_record,
    read_evaluated_records,
    write_evaluation_marker,
)
from megatron.sweeps.spec import SweepMember
from megatron.training.metrics_log import METRICS_FILE, read_metrics_log
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError
from megatron.utils.progress import WorkItem
from megatron.utils.signals import get_parent_variable

POLL_SECONDS = 0.2


class JobMeter(Protocol):
    """What is told of the jobs of a member while it runs: a `ProgressMeter`, or what passes all on to one."""

    def begin(self, job: WorkItem, detail: str = "") -> None: ...
    def update(self, done: float, detail: str = "") -> None: ...
    def finish(self) -> None: ...
    def skip(self, job: WorkItem) -> None: ...
    def log(self, line: str) -> None: ...


def run_member(member: SweepMember, work: MemberWork, meter: JobMeter) -> list[Record]:
    """Train and evaluate one member, as far as that is not done.

    Returns:
        What was measured of it.

    Raises:
        UserError, RunError: what the training ended with, or the evaluation refuses.
    """
    _train_member(member, work, meter)
    records = [
        record for name, job in work.evaluations.items() for record in _evaluate_member(member, name, job, meter)
    ]
    cost = read_training_cost(member.folder / METRICS_FILE)
    return [record if record.is_trivial_baseline else record.replace(**cost) for record in records]


def read_training_cost(metrics: Path) -> dict[str, float]:
    """The fields of records on what a training took: the median time of its steps, and its most memory."""
    steps = [record for _, record in read_metrics_log(metrics) if record["kind"] == "train" and "ms_per_step" in record]
    if not steps:
        return {}
    cost = {
        "step_seconds": statistics.median(record["ms_per_step"] for record in steps) / 1000,
        "train_memory_gib": max(record["memory_gib"] for record in steps),
    }
    # Runs of older versions say nothing of processors.
    if cpu_times := [record["cpu_ms_per_step"] for record in steps if record.get("cpu_ms_per_step") is not None]:
        cost["step_cpu_seconds"] = statistics.median(cpu_times) / 1000
    return cost


def _train_member(member: SweepMember, work: MemberWork, meter: JobMeter) -> None:
    """Train a member to its end, or find it trained."""
    done, steps, job = work.finished_steps, member.resolved_config.training.train_iters, work.training
    if done >= steps and not lacks_test_record(member):
        meter.skip(job)
        meter.log(f"{member.name}: trained already, {done} steps in {member.folder}")
        return
    if done:
        plan = f"resumes after step {done} of {steps}" if done < steps else "is trained; its test is made up for"
        meter.log(f"{member.name}: {plan}")
    if not done and member.origin is not None and not member.origin.is_dir():
        raise RunError(f"it branches from {member.origin}, which is not there: {member.trunk.name} has not come so far")  # type: ignore[union-attr]
    # With `load` naming its own folder a run resumes.
    config = member.config.replace(load=str(member.folder)) if done else member.config
    config.save(member.get_path_beside(".yml"))

    def show_step(step: int | None) -> None:
        fraction = 0.0 if step is None else max(0, step - done) / max(1, steps - done)
        meter.update(fraction * job.work, f"step {done if step is None else step} of {steps}")

    meter.begin(job, f"step {done} of {steps}")
    train_in_subprocess(
        member.get_path_beside(".yml"), member.get_path_beside(".txt"), member.folder / METRICS_FILE, show_step
    )
    if find_finished_step(member) < steps:
        raise RunError(f"training ended early without an error; its output is in {member.get_path_beside('.txt')}")
    meter.finish()


def _evaluate_member(member: SweepMember, name: str | None, job: WorkItem, meter: JobMeter) -> list[Record]:
    """Make a trained member's evaluation of that name, or find it made in the same way."""
    from megatron.evaluation.run import evaluate_runs

    records = read_evaluated_records(member, name)
    if records is not None:
        meter.skip(job)
        meter.log(f"{member.name}: evaluated already" + ("" if name is None else f" ({name})"))
        return records
    meter.begin(job, "loading")
    records = evaluate_runs(
        [member.folder],
        member.evaluations[name],
        output=member.results,
        names=[member.get_method(name)],
        progress=lambda length, done, total: meter.update(done, f"length {length:,}"),
    )
    meter.finish()
    write_evaluation_marker(member, records, name)
    return records


def train_in_subprocess(
    configuration: Path, output: Path, metrics: Path, show_step: Callable[[int | None], None]
) -> None:
    """Train to the end.

    Args:
        configuration: the run's whole configuration, a file.
        output: the file for what the training prints.
        metrics: the run's metrics.jsonl.
        show_step: called now and then with the newest step that this training recorded, None before the first.

    Raises:
        UserError, RunError: what the training ended with.
    """
    with open(output, "w", encoding="utf-8") as file:
        start_time = time.time()
        child = subprocess.Popen(
            [sys.executable, str(DEEPY), "train", str(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **get_parent_variable()},  # it ends with this process, however that goes
            start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
        )
        try:
            while child.poll() is None:
                show_step(read_last_step(metrics, start_time))
                time.sleep(POLL_SECONDS)
        finally:
            stop_child(child)
    if child.returncode != 0:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        otherwise = f"training ended with exit code {child.returncode}; its output is in {output}"
        raise build_command_error(child.returncode, lines, otherwise)


def read_last_step(metrics: Path, since: float) -> int | None:
    """The newest step in a run's metrics.jsonl, if that was written since a point in time."""
    try:
        if metrics.stat().st_mtime < since:
            return None
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 14)))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line end is still being written
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(parse_json(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None
