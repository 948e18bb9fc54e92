"""One rank of a rehearsal: a process on the null device that runs `train` as any rank does, and leaves a report.

`python -m megatron.rehearsal.rank_process JOB`, with the null device's environment and torchrun's variables. What is
changed in it, beside what the null device changes, is: weights have no values (`unset_weights`), files of checkpoints
no zeros (`sparse_files`); the first rank waits before it publishes a checkpoint until the other ranks that are
rehearsed have written their parts, and then makes up those of the rest (`missing_ranks`).
"""

import json
import linecache
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError, UserError, describe_error, is_out_of_memory

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RankJob:
    """What a process is to do. Files, by which it and whoever started it tell each other how far they are."""

    folder: str
    """Of the rehearsal."""
    config: str
    """The configuration's file."""
    phase: str
    """train or resume."""
    rank: int
    waits: bool = False
    """Does it wait for others before it publishes the checkpoint?"""

    @property
    def report(self) -> Path:
        return Path(self.folder) / f"{self.phase}-{self.rank}.json"

    @property
    def waiting(self) -> Path:
        """There while it waits."""
        return Path(self.folder) / f"{self.phase}-{self.rank}.waiting"

    @property
    def released(self) -> Path:
        """There when it need wait no longer."""
        return Path(self.folder) / f"{self.phase}-{self.rank}.released"


@dataclass
class RankError:
    """Why a rank ended early."""

    kind: str
    """user, memory, host memory, run or unexpected."""
    message: str
    phase: str = ""
    """What the run was doing, with its step."""
    where: tuple[str, ...] = ()
    """Our lines, the innermost first: file:line function: source."""


@dataclass
class RankReport:
    """What a rank did."""

    rank: int
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of the device in each phase, at most: (of tensors, of what the allocator held)."""
    error: RankError | None = None
    parameters: int | None = None
    """Of the whole model."""
    rank_parameters: int | None = None
    row_blocks_reason: str | None = None
    """Why attention runs in PyTorch's row blocks, if it does."""
    attention_backend: str | None = None
    """The value of the key of that name that says how attention was computed; None for row blocks, which have none."""
    warnings: list[str] = field(default_factory=list)
    """What our code warned of, calls that took another way than asked among them."""
    checkpoint: dict[str, int] | None = None
    """Bytes of a checkpoint: weights, states, and parts that are there while it is written."""
    seconds: float = 0.0
    """Of the process's own time on the CPU."""

    @property
    def peak_allocated(self) -> int:
        return max((allocated for allocated, _ in self.peaks.values()), default=0)

    @property
    def peak_reserved(self) -> int:
        return max((reserved for _, reserved in self.peaks.values()), default=0)

    @staticmethod
    def read(path: Path) -> "RankReport":
        """What a process wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        error = values.pop("error")
        peaks = {phase: tuple(peak) for phase, peak in values.pop("peaks").items()}
        return RankReport(**values, peaks=peaks, error=None if error is None else RankError(**error))


class PhaseMemory:
    """The peak of the device's memory in each phase of the run."""

    def __init__(self) -> None:
        self.phase, self.step = "start", 0
        self.peaks: dict[str, tuple[int, int]] = {}

    def enter(self, phase: str, step: int) -> None:
        """The run begins another phase."""
        if phase != self.phase:
            self.collect()
        self.phase, self.step = phase, step

    def collect(self) -> None:
        """Take the peak since the phase began, and begin to measure anew."""
        import torch

        if not torch.cuda.is_initialized():
            return
        allocated, reserved = self.peaks.get(self.phase, (0, 0))
        allocated = max(allocated, torch.cuda.max_memory_allocated())
        self.peaks[self.phase] = (allocated, max(reserved, torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()


def run_rank_job(job: RankJob) -> RankReport:
    """Run the command that a rank runs; whatever comes of it is in the report."""
    from megatron.config.load import load_config
    from megatron.distributed import hardware
    from megatron.launch.dispatch import launch_training

    report, memory = RankReport(job.rank), PhaseMemory()
    hardware.DEVICE_FOLDER = Path(os.devnull)  # so that the null device's are counted, and no others
    with ExitStack() as changes:
        changes.enter_context(_collect_warnings(report.warnings))
        try:
            _change_run(changes, job, report, memory)
            launch_training(lambda silent: load_config([job.config]), lambda notes: None)
        except BaseException as error:
            report.error = describe_rank_error(error, f"{memory.phase} of step {memory.step}")
            with open(f"{job.report}.traceback", "w", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
    memory.collect()
    report.peaks, report.seconds = memory.peaks, time.process_time()
    return report


def describe_rank_error(error: BaseException, phase: str) -> RankError:
    """An error as a report has it: of what lies behind it the first that says more."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    memory = next((e for e in chain if is_out_of_memory(e)), None)
    origin = memory or chain[-1]
    where = list_own_lines(origin)
    if memory is not None:
        kind = "memory" if type(memory).__name__ == "OutOfMemoryError" else "host memory"
        return RankError(kind, str(memory).partition(". GPU ")[0].partition("\n")[0] or "out of memory", phase, where)
    if isinstance(error, UserError):
        return RankError("user", str(error), phase)
    from megatron.launch.console import UnexpectedError

    if isinstance(error, FarfieldError) and not isinstance(error, UnexpectedError):
        return RankError("run", str(error), phase, where)
    return RankError("unexpected", describe_error(origin), phase, where)


def list_own_lines(error: BaseException) -> tuple[str, ...]:
    """The project's lines that an error came through, the innermost first."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(ROOT):
            continue
        path = path.relative_to(ROOT)
        if "site-packages" not in path.parts and not path.is_relative_to("megatron/rehearsal"):
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            lines.append(f"{path}:{frame.lineno} {frame.name}: {source}")
    return tuple(reversed(lines))[:6]


@contextmanager
def _collect_warnings(lines: list[str]) -> Iterator[None]:
    """Keep what the project's own modules warn of."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in lines:
                lines.append(text)

    handler = Collect(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("megatron.attention", "megatron.model", "kernels")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _change_run(changes: ExitStack, job: RankJob, report: RankReport, memory: PhaseMemory) -> None:
    """What a rehearsed rank does otherwise than a real one."""
    from megatron.checkpoint import saver, sharded_state
    from megatron.distributed.hardware import LocalHardware
    from megatron.model import backend_choice
    from megatron.rehearsal.missing_ranks import write_stage_parameters
    from megatron.rehearsal.sparse_files import sparse_checkpoints
    from megatron.rehearsal.unset_weights import without_weight_values
    from megatron.training import trainer
    from megatron.training.watchdog import Watchdog

    # Of a model whose weights have no values this machine holds little; what the run's own must hold is reported.
    hardware = replace(LocalHardware.detect(), memory=None)
    changes.enter_context(mock.patch.object(LocalHardware, "detect", staticmethod(lambda: hardware)))
    changes.enter_context(without_weight_values())
    changes.enter_context(sparse_checkpoints())

    def enter_phase(self: Watchdog, phase: str, step: int) -> None:
        memory.enter(phase, step)
        real_enter_phase(self, phase, step)

    def build_training_run(*arguments: Any, **options: Any) -> Any:
        run = real_build(*arguments, **options)
        model: Any = run.engine.model
        report.parameters, report.row_blocks_reason = run.parameters, model.row_blocks_reason
        report.attention_backend = model.backend_choice.name
        report.rank_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        return run

    def begin_snapshot(self: Any, engine: Any, mesh: Any, copies: Any) -> None:
        write_stage_parameters(_get_stage_path(job, mesh.pipeline.index), engine.module)
        real_snapshot(self, engine, mesh, copies)

    def publish(self: Any, run: Path, save: Any, entries: dict[str, Any]) -> dict[str, Any]:
        _wait_for_others(job)
        parts, entries = _complete(job, self.groups.mesh.sizes, save, entries)
        result: dict[str, Any] = real_publish(self, run, save, entries)
        report.checkpoint = _measure_checkpoint(save.final) | {"parts": parts}
        return result

    def settle_choice(found: Any, default: str, kept: str | None, **options: Any) -> Any:
        # As in a run, where all ranks take one backend: here the one that the first rank to run takes.
        path = Path(job.folder) / "attention_backend"
        chosen, lines = real_settle(found, default, path.read_text() if path.exists() else kept, **options)
        path.write_text(chosen)
        return chosen, lines

    real_settle = backend_choice.settle_choice
    real_enter_phase, real_build = Watchdog.enter_phase, trainer.build_training_run
    real_snapshot, real_publish = sharded_state.Snapshot.__init__, saver.Saver._publish
    for owner, name, change in (
        (Watchdog, "enter_phase", enter_phase),
        (trainer, "build_training_run", build_training_run),
        (sharded_state.Snapshot, "__init__", begin_snapshot),
        (saver.Saver, "_publish", publish),
        (backend_choice, "settle_choice", settle_choice),
    ):
        changes.enter_context(mock.patch.object(owner, name, change))


def _get_stage_path(job: RankJob, stage: int) -> Path:
    return Path(job.folder) / "stages" / f"{stage}.json"


def _wait_for_others(job: RankJob) -> None:
    """Until the ranks that are rehearsed after this one have written their parts."""
    if not job.waits:
        return
    job.waiting.touch()
    while not job.released.exists():
        time.sleep(POLL_SECONDS)


def _complete(job: RankJob, sizes: Any, save: Any, entries: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The bytes of all parts, and the entries of all states' files, those of ranks that do not run made up."""
    from megatron.checkpoint.manifest import STATES, compute_checksums
    from megatron.checkpoint.sharded_state import PARTS
    from megatron.rehearsal.missing_ranks import complete_checkpoint, read_stage_parameters

    folder = save.temporary
    written = [path for path in (folder / STATES).iterdir() if f"{STATES}/{path.name}" not in entries]
    entries = entries | compute_checksums(folder, written)
    stages = [read_stage_parameters(_get_stage_path(job, stage)) for stage in range(sizes.pipeline)]
    entries |= complete_checkpoint(folder, sizes, stages, save.state.step)
    return sum(path.stat().st_size for path in (folder / PARTS).iterdir()), entries


def _measure_checkpoint(checkpoint: Path) -> dict[str, int]:
    from megatron.checkpoint.layout import WEIGHTS

    files = {path: path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    weights = files[checkpoint / WEIGHTS]
    return {"weights": weights, "states": sum(files.values()) - weights}


def main(arguments: list[str]) -> int:
    """`JOB`: a file that says what to do."""
    from megatron.utils.signals import end_with_parent, install_exit_handlers

    install_exit_handlers()
    end_with_parent()
    threading.current_thread().name = "rank"
    job = RankJob(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    report = run_rank_job(job)
    write_text_atomically(job.report, json.dumps(asdict(report)))
    return 0 if report.error is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
