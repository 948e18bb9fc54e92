"""One member of a sweep: its training, in a subprocess that is started, monitored and stopped, and its evaluation."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.run_folder import RunLock
from megatron.reports.records import Record
from megatron.sweeps.remaining_work import (
    MemberWork,
    find_finished_step,
    lacks_test_record,
    read_evaluated_records,
    write_evaluation_marker,
)
from megatron.sweeps.spec import SweepMember
from megatron.training.metrics_log import METRICS_FILE, read_last_step, read_metrics_log
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.formatting import format_quantity
from megatron.utils.progress import WaitAnnouncer, WorkItem
from megatron.utils.project import COMMAND
from megatron.utils.signals import get_parent_variable

POLL_SECONDS = 0.2


class JobMeter(Protocol):
    """Interface for reporting a member's jobs: a `ProgressMeter`, or an object that forwards to one."""

    def begin(self, job: WorkItem, detail: str = "") -> None: ...
    def update(self, done: float, detail: str = "") -> None: ...
    def finish(self) -> None: ...
    def skip(self, job: WorkItem) -> None: ...
    def log(self, line: str) -> None: ...


def run_member(member: SweepMember, work: MemberWork, meter: JobMeter) -> list[Record]:
    """Train and evaluate one member, except for completed work.

    Returns:
        Records of the member.

    Raises:
        UserError, RunError: error of the training or the evaluation.
    """
    _train_member(member, work, meter)
    records = [
        record for name, job in work.evaluations.items() for record in _evaluate_member(member, name, job, meter)
    ]
    cost = read_training_cost(member.folder / METRICS_FILE)
    return [record if record.is_trivial_baseline else record.replace(**cost) for record in records]


def read_training_cost(metrics: Path) -> dict[str, float]:
    """Return the record fields for training cost: median step time, and peak memory."""
    steps = [record for _, record in read_metrics_log(metrics) if record["kind"] == "train" and "ms_per_step" in record]
    if not steps:
        return {}
    cost = {
        "step_seconds": statistics.median(record["ms_per_step"] for record in steps) / 1000,
        "train_memory_gib": max(record["memory_gib"] for record in steps),
    }
    # Runs of older versions did not record CPU time.
    if cpu_times := [record["cpu_ms_per_step"] for record in steps if record.get("cpu_ms_per_step") is not None]:
        cost["step_cpu_seconds"] = statistics.median(cpu_times) / 1000
    return cost


def _train_member(member: SweepMember, work: MemberWork, meter: JobMeter) -> None:
    """Train a member to its end, or skip it if it is already trained."""
    done = find_finished_step(member)
    if _needs_training(member, done):
        with _lock_training(member, meter.log):
            done = find_finished_step(member)  # with sweep.runs, another member or sweep may have trained the run
            if _needs_training(member, done):
                _continue_training(member, done, work.training, meter)
                return
    meter.skip(work.training)
    meter.log(f"{member.name}: already trained: {format_quantity(done, 'step')} in {member.folder}")


def _needs_training(member: SweepMember, done: int) -> bool:
    """Return True if a member's training has steps left after step `done`, or lacks its final test."""
    return done < member.resolved_config.training.train_iters or lacks_test_record(member)


@contextmanager
def _lock_training(member: SweepMember, log: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other sweep trains the member's run, and keep it for the block."""
    with WaitAnnouncer(log, f"{member.name}: waiting for another process that trains {member.folder}"):
        lock = RunLock(member.folder.parent, name=f".{member.folder.name}.lock", lock_timeout=math.inf)
    try:
        yield
    finally:
        lock.release(remove_file=True)


def _continue_training(member: SweepMember, done: int, job: WorkItem, meter: JobMeter) -> None:
    """Train a member to its end, from the checkpoint of step `done` or from its start."""
    steps = member.resolved_config.training.train_iters
    if done:
        plan = f"resuming after step {done} of {steps}" if done < steps else "trained; evaluating the test text"
        meter.log(f"{member.name}: {plan}")
    if not done and member.origin is not None and not member.origin.is_dir():
        assert member.trunk is not None  # a branch has one
        raise RunError(
            f"it branches from {member.origin}, which does not exist: {member.trunk.name} has not reached this step"
        )
    # A run resumes if `load` is its own folder, with all states even if it began with the weights of another run.
    config = member.config.replace(load=str(member.folder), finetune=False) if done else member.config
    config.save(member.get_sibling_path(".yml"))

    def show_step(step: int | None) -> None:
        fraction = 0.0 if step is None else max(0, step - done) / max(1, steps - done)
        meter.update(fraction * job.work, f"step {done if step is None else step} of {steps}")

    meter.begin(job, f"step {done} of {steps}")
    train_in_subprocess(
        member.get_sibling_path(".yml"), member.get_sibling_path(".txt"), member.folder / METRICS_FILE, show_step
    )
    if find_finished_step(member) < steps:
        raise RunError(f"training stopped early without an error; output: {member.get_sibling_path('.txt')}")
    meter.finish()


def _evaluate_member(member: SweepMember, name: str | None, job: WorkItem, meter: JobMeter) -> list[Record]:
    """Run an evaluation of a trained member, or return its records if the same evaluation was already run."""
    from megatron.evaluation.run import evaluate_runs

    records = read_evaluated_records(member, name)
    if records is not None:
        meter.skip(job)
        meter.log(f"{member.name}: already evaluated" + ("" if name is None else f" ({name})"))
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
    """Train a run to its end.

    Args:
        configuration: file with the run's resolved configuration.
        output: file for the output of the training.
        metrics: metrics.jsonl of the run.
        show_step: called periodically with the newest step recorded by this training, or None before the first.

    Raises:
        UserError, RunError: error of the training.
    """
    with open(output, "w", encoding="utf-8") as file:
        start_time = time.time()
        child = subprocess.Popen(
            [sys.executable, *COMMAND, "train", str(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **get_parent_variable()},  # it ends when this process ends, even by SIGKILL
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
        )
        try:
            while child.poll() is None:
                show_step(read_last_step(metrics, start_time))
                time.sleep(POLL_SECONDS)
        finally:
            stop_child(child)
    if child.returncode != 0:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        otherwise = f"training failed with exit code {child.returncode}; output: {output}"
        raise build_command_error(child.returncode, lines, otherwise)


def stop_child(child: subprocess.Popen[Any], show: Callable[[Any], object] = lambda line: None) -> None:
    """Stop a running command when its parent exits; a training first saves after its current step.

    show: called with each line that the command still prints.
    """
    if child.poll() is not None:
        return
    child.terminate()
    try:
        for line in child.stdout or ():  # a child whose pipe is not read does not exit
            show(line)
        child.wait()
    except BaseException:  # a second signal
        child.kill()
        child.wait()
        raise


def build_command_error(code: int, lines: Iterable[str], otherwise: str) -> FarfieldError:
    """Build an error of the right class from a failed command's own error lines.

    Args:
        code: exit code of the command.
        lines: its output.
        otherwise: message if it printed no error.
    """
    errors = [line.strip().removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = "; ".join(errors) if errors else otherwise
    return UserError(message) if code == UserError.exit_code and errors else RunError(message)
