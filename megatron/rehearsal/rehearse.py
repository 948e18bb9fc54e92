"""Run a rehearsal: the distinct ranks of a run, one after the other, on the null device, in a temporary folder.

    train     the first rank trains, writes its checkpoint shard and waits; the other ranks then run from start to end;
              finally the first rank completes the checkpoint
    resume    each rank resumes from the checkpoint and runs one step

Each rank is a separate process (`rank_process.py`). Its result, ledger and summary become part of a `Rehearsal`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.distributed.launcher_environment import ADDRESS, RankInfo, find_free_port
from megatron.rehearsal.matching import Mismatch, find_mismatches
from megatron.rehearsal.null_device.environment import GpuModel, build_environment
from megatron.rehearsal.rank_process import RankError, RankJob, RankResult
from megatron.rehearsal.rehearsed_run import STEPS, RehearsedRun
from megatron.rehearsal.roles import Ledger, RankRole, choose_roles, list_stages, read_ledger
from megatron.utils.atomic_directory import temporary_folder
from megatron.utils.errors import RunError, UserError
from megatron.utils.formatting import format_duration
from megatron.utils.imports import SAFE_PATH_VARIABLE
from megatron.utils.progress import WaitAnnouncer
from megatron.utils.signals import clean_up_on_signal, get_parent_variable

TRAIN, RESUME = "train", "resume"
POLL_SECONDS = 0.05
HEARTBEAT_SECONDS = 8.0
"""Interval between progress lines about a slow rank, in seconds."""
FULL_BYTES = 16 << 20
"""Free disk space, in bytes, below which a failure is attributed to a full disk."""
MIN_FREE_BYTES = 1 << 30
"""Free space required in the temporary folder, in bytes: corpus, logs, and state values that are not zero."""
RANK_COMMAND = (sys.executable, "-m", "megatron.rehearsal.rank_process")
LAUNCHER_VARIABLES = ("SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_")
"""Prefixes of variables that would make a rank process believe it belongs to another job."""


@dataclass(frozen=True)
class RankTrace:
    """Records of one rank during one action."""

    result: RankResult
    ledger: Ledger
    summary: dict[str, Any]
    """Summary of the null device: peaks, counters, kernels; empty if the process was killed."""
    seconds: float
    """Wall time from start to end, in seconds; for the first rank without waiting."""


@dataclass
class Rehearsal:
    """Findings of a rehearsal."""

    run: RehearsedRun
    gpu: GpuModel
    roles: list[RankRole]
    train_traces: dict[int, RankTrace] = field(default_factory=dict)
    """Traces of the training action, by rank."""
    resume_traces: dict[int, RankTrace] = field(default_factory=dict)
    mismatches: list[tuple[str, Mismatch]] = field(default_factory=list)
    """Mismatches between ranks, each with its action."""
    distinct_sequences: int = 0
    """Number of distinct operation sequences among the ranks that ran; pipeline stages have their own."""
    unmatched_ranks: int = 0
    """Number of ranks that are not represented, or whose process did not finish."""
    seconds: float = 0.0

    @property
    def world_size(self) -> int:
        return self.run.world_size

    @property
    def checkpoint(self) -> dict[str, int] | None:
        """Bytes of a checkpoint; None if none was written."""
        return self.train_traces[0].result.checkpoint if 0 in self.train_traces else None

    def find_errors(self) -> list[tuple[str, int, RankError]]:
        """Return the ranks that ended early, as (action, rank, error)."""
        actions = ((TRAIN, self.train_traces), (RESUME, self.resume_traces))
        return [
            (action, rank, trace.result.error)
            for action, traces in actions
            for rank, trace in traces.items()
            if trace.result.error is not None
        ]


Progress = Callable[[str], None]


def rehearse(
    run: RehearsedRun,
    gpu: GpuModel,
    selection: str | list[int],
    progress: Progress = lambda line: None,
    command: Sequence[str] = RANK_COMMAND,
) -> Rehearsal:
    """Rehearse a run.

    Args:
        run: run to rehearse (`plan_rehearsal`).
        gpu: GPU that each device emulates.
        selection: ranks to run; see `choose_roles`.
        progress: callback that receives one line per starting rank.
        command: command of each rank; its job is appended as an argument.

    Raises:
        UserError: if the null device cannot be built, the configuration is invalid, a rank does not exist, or the disk
            is full. No files are left behind.
        RunError: if a process cannot be started.
    """
    start = time.monotonic()
    rehearsal = Rehearsal(run, gpu, choose_roles(run.sizes, selection))
    if rehearsal.roles[0].rank != 0:
        raise UserError("--ranks: rank 0 must be included; it orders the data and completes checkpoints")
    with WaitAnnouncer(progress, "compiling the null CUDA device"):
        build_environment(gpu)  # first, to fail or compile before any folder is created
    with _temporary_folder() as folder:
        _Execution(rehearsal, folder, progress, command).execute()
    rehearsal.seconds = time.monotonic() - start
    return rehearsal


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a temporary folder that is removed when this process ends."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder("rehearsal"))
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise UserError(f"{tempfile.gettempdir()}: cannot create a temporary folder ({error.strerror})") from error
        if free < MIN_FREE_BYTES:
            raise UserError(
                f"{folder.parent}: {free / 2**30:.2f} GiB free, but a rehearsal needs "
                f"{MIN_FREE_BYTES / 2**30:.0f}; set TMPDIR to a folder with more space"
            )
        yield folder


class _Execution:
    """Processes of a rehearsal."""

    def __init__(self, rehearsal: Rehearsal, folder: Path, progress: Progress, command: Sequence[str]) -> None:
        self._rehearsal, self._folder, self._progress, self._command = rehearsal, folder, progress, command
        self._run = rehearsal.run
        self._ranks = [role.rank for role in rehearsal.roles]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts = 0
        self._start_time = self._last_start_time = time.monotonic()

    def execute(self) -> None:
        """Run both actions and add their findings to the rehearsal."""
        rehearsal = self._rehearsal
        with clean_up_on_signal(self._end_processes):
            try:
                config = self._run.build_config(self._folder)
                can_save = self._can_save()
                if not can_save:
                    config = config.replace(save=None)
                config.save(self._folder / f"{TRAIN}.yml")
                self._train(can_save=can_save)
                self._match(TRAIN, rehearsal.train_traces)
                if rehearsal.checkpoint is not None and not rehearsal.mismatches:
                    save = config.checkpoint.save
                    config = config.replace(save=None, load=save, train_iters=STEPS + 1)
                    config.save(self._folder / f"{RESUME}.yml")
                    for rank in self._ranks:
                        rehearsal.resume_traces[rank] = self._finish(RESUME, rank, self._start(RESUME, rank))
                    self._match(RESUME, rehearsal.resume_traces)
            finally:
                self._end_processes()

    def _can_save(self) -> bool:
        """Return True if every pipeline stage has a rank that runs.

        The first rank, which completes the checkpoint, always runs.
        """
        ran = set(self._ranks)
        return all(ran & set(stage) for stage in list_stages(self._run.sizes))

    def _train(self, *, can_save: bool) -> None:
        traces, others = self._rehearsal.train_traces, [rank for rank in self._ranks if rank != 0]
        begin = time.monotonic()
        first = self._start(TRAIN, 0, waits=can_save and bool(others))
        self._wait(TRAIN, 0, first, self._build_job(TRAIN, 0).waiting)
        spent = time.monotonic() - begin
        if first.poll() is not None:
            traces[0] = self._finish(TRAIN, 0, first, spent)
        for rank in others:
            traces[rank] = self._finish(TRAIN, rank, self._start(TRAIN, rank))
        if 0 not in traces:
            self._progress("completing the checkpoint")
            self._build_job(TRAIN, 0).released.touch()
            traces[0] = self._finish(TRAIN, 0, first, spent)

    def _build_job(self, action: str, rank: int, *, waits: bool = False) -> RankJob:
        return RankJob(
            str(self._folder), str(self._folder / f"{action}.yml"), action, rank, self._run.devices_per_node, waits
        )

    def _count_starts(self) -> int:
        return len(self._ranks) * (2 if self._can_save() else 1)

    def _describe_time_left(self) -> str:
        """Describe the remaining time by the mean time of the starts before the last one; empty without any."""
        if (finished := self._starts - 1) < 1:
            return ""
        mean = (self._last_start_time - self._start_time) / finished
        left = mean * (self._count_starts() - finished) - (time.monotonic() - self._last_start_time)
        return f", about {format_duration(left)} left" if left > 0 else ""

    def _start(self, action: str, rank: int, *, waits: bool = False) -> subprocess.Popen[bytes]:
        run, job = self._run, self._build_job(action, rank, waits=waits)
        role = next(role for role in self._rehearsal.roles if role.rank == rank)
        self._starts += 1
        self._last_start_time = time.monotonic()
        starts, coordinates = self._count_starts(), role.describe_coordinates(run.sizes)
        self._progress(
            f"process {self._starts} of {starts}: {action}, rank {rank} ({coordinates}){self._describe_time_left()}"
        )
        path = self._folder / f"{action}-{rank}.job"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        environment = build_environment(
            self._rehearsal.gpu,
            devices=run.devices_per_node,
            ledger=self._folder / f"{action}.ledger",
            is_single_rank=run.world_size > 1,
            base={name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)},
        )
        info = RankInfo(rank, run.world_size, rank % run.devices_per_node, run.devices_per_node)
        environment |= info.to_environment(ADDRESS, find_free_port()) | get_parent_variable() | SAFE_PATH_VARIABLE
        environment.setdefault("OMP_NUM_THREADS", "1")
        # Caches of the null device are never shared with real runs and are removed afterwards.
        environment["XDG_CACHE_HOME"] = str(self._folder / "cache")
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder / "cache" / "torchinductor")
        try:
            with open(self._folder / f"{action}-{rank}.out", "wb") as output:
                process = subprocess.Popen(
                    [*self._command, str(path)],
                    env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise RunError(f"rank {rank} cannot be started: {error.strerror}") from error
        self._processes.append(process)
        return process

    def _finish(self, action: str, rank: int, process: subprocess.Popen[bytes], spent: float = 0.0) -> RankTrace:
        """Collect the trace of a rank after its process has ended.

        Raises:
            UserError: if the run rejects its configuration, as all ranks would.
        """
        begin = time.monotonic()
        code = self._wait(action, rank, process)
        self._processes.remove(process)
        seconds = spent + time.monotonic() - begin
        job, ledgers = self._build_job(action, rank), self._folder / f"{action}.ledger"
        if code != 0:
            self._check_free_space()
        if job.result.is_file():
            result = RankResult.read(job.result)
        else:
            result = RankResult(rank, error=self._describe_end(action, rank, code))
        if result.error is not None and result.error.kind == "user":
            raise UserError(result.error.message)
        if result.error is not None and result.error.kind == "unexpected":
            result.error.message += f"; the traceback is in {self._keep_traceback(action, rank)}"
        summary: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            summary = json.loads((ledgers / f"rank-{rank}.summary.json").read_text(encoding="utf-8"))
        with suppress(RunError):  # the last line of a killed process may be truncated
            return RankTrace(result, read_ledger(ledgers / f"rank-{rank}.jsonl", rank), summary, seconds)
        return RankTrace(result, Ledger(rank, ()), summary, seconds)

    def _wait(self, action: str, rank: int, process: subprocess.Popen[bytes], until: Path | None = None) -> int:
        """Wait for a process and return its exit code, or return 0 as soon as the given file exists."""
        begin = last = time.monotonic()
        while (code := process.poll()) is None and not (until is not None and until.exists()):
            time.sleep(POLL_SECONDS)
            if (now := time.monotonic()) - last >= HEARTBEAT_SECONDS:
                last = now
                self._progress(f"{action}: rank {rank} has run for {now - begin:.0f} s{self._describe_time_left()}")
        return code or 0

    def _check_free_space(self) -> None:
        """Raise RunError if the disk is full, because then a failure does not concern the run itself."""
        if shutil.disk_usage(self._folder).free < FULL_BYTES:
            raise RunError(f"{tempfile.gettempdir()} is full; set TMPDIR to a folder with more space")

    def _describe_end(self, action: str, rank: int, code: int) -> RankError:
        """Explain why a process left no result."""
        lines = (self._folder / f"{action}-{rank}.out").read_text(encoding="utf-8", errors="replace").splitlines()
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return RankError("host memory" if name == "SIGKILL" else "run", f"its process was killed by {name}{hint}")
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
        return RankError("run", last.removeprefix("error: "))

    def _keep_traceback(self, action: str, rank: int) -> str:
        """Copy a rank's traceback to a file that outlives the folder."""
        source = Path(f"{self._build_job(action, rank).result}.traceback")
        handle, name = tempfile.mkstemp(prefix="farfield-", suffix=".log")
        os.close(handle)
        with suppress(OSError):
            shutil.copyfile(source, name)
        return name

    def _match(self, action: str, traces: dict[int, RankTrace]) -> None:
        """Compare the collectives of all ranks that finish an action."""
        rehearsal, sizes = self._rehearsal, self._run.sizes
        whole = {rank: trace.ledger for rank, trace in traces.items() if trace.result.error is None}
        ledgers: dict[int, Ledger] = {}
        for role in rehearsal.roles:
            if role.rank in whole:
                ledgers |= {rank: whole[role.rank].translate(rank, sizes) for rank in role.represented_ranks}
        rehearsal.mismatches += [(action, mismatch) for mismatch in find_mismatches(ledgers, sizes)]
        if action == TRAIN:
            rehearsal.distinct_sequences = len({hash(ledger.normalize(sizes)) for ledger in whole.values()})
            rehearsal.unmatched_ranks = sizes.world_size - len(ledgers)

    def _end_processes(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()
