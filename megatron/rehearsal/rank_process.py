"""Process of one rehearsed rank: run `train` on the null device as any rank does, and save the result.

`python -m megatron.rehearsal.rank_process JOB`, with the null device's environment and torchrun's variables. Besides
the changes of the null device, weights have no values (`skip_weight_initialization`) and checkpoint files store no
zeros (`SparseFile`). Before publishing a checkpoint, the first rank waits until the other rehearsed ranks have written
their shards, and then writes the shards of the remaining ranks (`missing_ranks`). Training and saving offer hooks for
this (`TrainingHooks`, `SaveHooks`), which no command or key sets.
"""

import json
import linecache
import logging
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.execution import TRIAL_PHASE
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError, UserError, describe_error, is_out_of_memory
from megatron.utils.project import find_own_path

if TYPE_CHECKING:
    from megatron.checkpoint.saver import Entries
    from megatron.distributed.mesh import ParallelSizes
    from megatron.training.trainer import TrainingHooks
    from megatron.training.training_run import TrainingRun

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RankJob:
    """Job of a rank process. Files report progress between the process and its parent."""

    folder: str
    """Folder of the rehearsal."""
    config: str
    """Path of the configuration file."""
    action: str
    """Action to run: train or resume."""
    rank: int
    devices: int
    """Number of devices of the node."""
    waits: bool = False
    """True if the process waits for other ranks before it publishes the checkpoint."""

    @property
    def result(self) -> Path:
        """File that exists once the process has finished; contains a `RankResult`."""
        return Path(self.folder) / f"{self.action}-{self.rank}.json"

    @property
    def waiting(self) -> Path:
        """File that exists while the process waits."""
        return Path(self.folder) / f"{self.action}-{self.rank}.waiting"

    @property
    def released(self) -> Path:
        """File that exists once the process may stop waiting."""
        return Path(self.folder) / f"{self.action}-{self.rank}.released"


@dataclass
class RankError:
    """Reason why a rank ended early."""

    kind: str
    """One of user, memory, host memory, run or unexpected."""
    message: str
    phase: str = ""
    """Phase of the run in which it ended (`Watchdog.enter_phase`), with the step."""
    where: tuple[str, ...] = ()
    """Project lines, innermost first, as "file:line function: source"."""


@dataclass
class RankResult:
    """Result of a rank."""

    rank: int
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Peak device memory of each phase, in bytes: (allocated tensors, reserved by the allocator)."""
    error: RankError | None = None
    parameters: int | None = None
    """Parameters of the whole model."""
    rank_parameters: int | None = None
    row_blocks_reason: str | None = None
    """Reason why attention uses PyTorch's row blocks, or None if it does not."""
    attention_backend: str | None = None
    """Value of the `attention_backend` key that describes how attention was computed; None for row blocks, which have
    none."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the project's code, including fallbacks."""
    miscompiled_kernels: list[str] = field(default_factory=list)
    """Project kernels that ptxas miscompiled (`find_uninitialized_reads`), checked by the first rank."""
    checkpoint: dict[str, int] | None = None
    """Bytes of a checkpoint: weights, states, and temporary shards during the save."""
    seconds: float = 0.0
    """CPU time of the process, in seconds."""

    @property
    def peak_allocated(self) -> int:
        return max((allocated for allocated, _ in self.peaks.values()), default=0)

    @property
    def peak_reserved(self) -> int:
        return max((reserved for _, reserved in self.peaks.values()), default=0)

    @staticmethod
    def read(path: Path) -> "RankResult":
        """Read the result written by a process."""
        values = json.loads(path.read_text(encoding="utf-8"))
        error = values.pop("error")
        peaks = {phase: tuple(peak) for phase, peak in values.pop("peaks").items()}
        return RankResult(**values, peaks=peaks, error=None if error is None else RankError(**error))


class PhaseMemory:
    """Recorder of peak device memory in each phase of the run."""

    def __init__(self) -> None:
        self.phase, self.step = "start", 0
        self.peaks: dict[str, tuple[int, int]] = {}

    def enter(self, phase: str, step: int) -> None:
        if phase != self.phase:
            self.collect()
        self.phase, self.step = phase, step

    def collect(self) -> None:
        """Record the peak of the current phase and reset the measurement."""
        import torch

        if not torch.cuda.is_initialized():
            return
        if self.phase != TRIAL_PHASE:
            allocated, reserved = self.peaks.get(self.phase, (0, 0))
            allocated = max(allocated, torch.cuda.max_memory_allocated())
            self.peaks[self.phase] = (allocated, max(reserved, torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()


def run_rank_job(job: RankJob) -> RankResult:
    """Run the command of a rank; record its outcome, including errors, in the result."""
    from megatron.config.load import load_config
    from megatron.distributed.hardware import LocalHardware, count_cores
    from megatron.distributed.launcher_environment import read_launcher_environment
    from megatron.launch.dispatch import launch_training, report_errors_once
    from megatron.rehearsal.missing_ranks import skip_weight_initialization

    result = RankResult(job.rank)
    rank_hooks = RankHooks(job, result)
    memory = rank_hooks.memory
    # A model whose weights have no values needs little host memory; the real requirement is reported.
    hardware = LocalHardware(job.devices, count_cores(), memory=None)
    with _collect_warnings(result.warnings), skip_weight_initialization():
        try:
            launch_context = read_launcher_environment()
            with report_errors_once(launch_context):
                launch_training(
                    load_config([job.config]),
                    launch_context,
                    lambda notes: None,
                    hardware=hardware,
                    hooks=rank_hooks.build_hooks(),
                )
        except BaseException as error:
            result.error = describe_rank_error(error, f"{memory.phase} of step {memory.step}")
            with open(f"{job.result}.traceback", "w", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
    memory.collect()
    if job.rank == 0 and job.action == "train":
        _find_miscompiled_kernels(result)
    result.peaks, result.seconds = memory.peaks, time.process_time()
    return result


def _find_miscompiled_kernels(result: RankResult) -> None:
    from megatron.kernels.compile import list_miscompiled_kernels

    try:
        result.miscompiled_kernels = list_miscompiled_kernels()
    except (OSError, subprocess.CalledProcessError) as error:
        result.warnings.append(f"cannot check whether kernels are miscompiled: {error}")


def describe_rank_error(error: BaseException, phase: str) -> RankError:
    """Convert an error to its record, using the first underlying cause that is more specific."""
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
    from megatron.utils.console import UnexpectedError

    if isinstance(error, FarfieldError) and not isinstance(error, UnexpectedError):
        return RankError("run", str(error), phase, where)
    return RankError("unexpected", describe_error(origin), phase, where)


def list_own_lines(error: BaseException) -> tuple[str, ...]:
    """List the project's lines in an error's traceback, innermost first."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = find_own_path(frame.filename)
        if path is not None and not path.is_relative_to("megatron/rehearsal"):
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            lines.append(f"{path}:{frame.lineno} {frame.name}: {source}")
    return tuple(reversed(lines))[:6]


@contextmanager
def _collect_warnings(lines: list[str]) -> Iterator[None]:
    """Collect warnings from the project's own modules."""

    class MessageCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in lines:
                lines.append(text)

    handler = MessageCollector(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("megatron.attention", "megatron.model", "megatron.kernels")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class RankHooks:
    """Training hooks of a rehearsed rank (`hooks`).

    Args:
        job: job of this process.
        result: record to which the outcome is added.
    """

    def __init__(self, job: RankJob, result: RankResult) -> None:
        self.memory = PhaseMemory()
        self._job, self._result = job, result
        self._sizes: ParallelSizes | None = None
        self._parts_bytes = 0

    def build_hooks(self) -> "TrainingHooks":
        """Build the hooks for this rank's training."""
        from megatron.checkpoint.saver import SaveHooks
        from megatron.rehearsal.missing_ranks import SparseFile, ZeroStagingBuffers
        from megatron.training.trainer import TrainingHooks

        # All ranks of a run use one backend: the choice of the first rank that runs.
        path = self._get_backend_path()
        save = SaveHooks(ZeroStagingBuffers, SparseFile, self._complete_checkpoint, self._measure_checkpoint)
        return TrainingHooks(
            on_phase=self.memory.enter,
            on_built=self._describe_run,
            previous_backend=path.read_text(encoding="utf-8") if path.exists() else None,
            save=save,
        )

    def _get_backend_path(self) -> Path:
        return Path(self._job.folder) / "attention_backend"

    def _get_stage_path(self, stage: int) -> Path:
        return Path(self._job.folder) / "stages" / f"{stage}.json"

    def _describe_run(self, run: "TrainingRun") -> None:
        from megatron.rehearsal.missing_ranks import write_stage_parameters

        result, model, mesh = self._result, run.engine.model, run.groups.mesh
        choice = run.backend_choice
        result.parameters, result.row_blocks_reason = run.parameters, choice.row_blocks_reason
        result.attention_backend = choice.name
        result.rank_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        if choice.records:
            names = ",".join(record.backend for record in choice.records)
            self._get_backend_path().write_text(names, encoding="utf-8")
        write_stage_parameters(self._get_stage_path(mesh.pipeline.index), run.engine.deepspeed.module)
        self._sizes = mesh.sizes

    def _complete_checkpoint(self, folder: Path, step: int, entries: "Entries") -> "Entries":
        """Wait for the ranks rehearsed after this one, then write the files of the ranks that do not run."""
        from megatron.checkpoint.manifest import STATES, compute_checksums
        from megatron.checkpoint.sharded_state import PARTS
        from megatron.rehearsal.missing_ranks import complete_checkpoint, read_stage_parameters

        if self._job.waits:
            self._job.waiting.touch()
            while not self._job.released.exists():
                time.sleep(POLL_SECONDS)
        assert self._sizes is not None
        written = [path for path in (folder / STATES).iterdir() if f"{STATES}/{path.name}" not in entries]
        entries = entries | compute_checksums(folder, written)
        stages = [read_stage_parameters(self._get_stage_path(stage)) for stage in range(self._sizes.pipeline)]
        entries |= complete_checkpoint(folder, self._sizes, stages, step)
        self._parts_bytes = sum(path.stat().st_size for path in (folder / PARTS).iterdir())
        return entries

    def _measure_checkpoint(self, checkpoint: Path) -> None:
        from megatron.checkpoint.layout import WEIGHTS

        files = {path: path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
        weights = files[checkpoint / WEIGHTS]
        states = sum(files.values()) - weights
        self._result.checkpoint = {"weights": weights, "states": states, "parts": self._parts_bytes}


def main(arguments: list[str]) -> int:
    """Run the job described by the file `JOB`. Return 2 if this process does not run on the null device."""
    from megatron.rehearsal.null_device.recorder import load_library
    from megatron.utils.signals import exit_with_parent, install_exit_handlers

    try:
        load_library()
    except RuntimeError as error:
        print(f"error: a rehearsed rank needs the null device: {error}", file=sys.stderr)
        return 2
    install_exit_handlers()
    exit_with_parent(signal.SIGKILL)  # training takes SIGHUP as a request to save, and would wait for the parent
    threading.current_thread().name = "rank"
    job = RankJob(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    result = run_rank_job(job)
    write_text_atomically(job.result, json.dumps(asdict(result)))
    return 0 if result.error is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
