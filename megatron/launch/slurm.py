"""`launcher: slurm`: submit work as a job, with a batch script that users can read, edit and submit again.

    FOLDER/job.sbatch      the script
    FOLDER/job.yml         the run's configuration, which the script's command reads
    FOLDER/slurm-17.out    output of job 17, including restarts

srun starts the ranks, which read their rank from its environment (`megatron.distributed.launcher_environment`). The
script does not trap signals: `--signal=TERM@S` reaches the ranks, which save and exit with 143. srun returns this code,
and the script requeues its job. A preemption has the same effect without the script.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.schema import Config
from megatron.options.launch import LaunchOptions
from megatron.training.check_start import TrainingMachines
from megatron.utils.atomic_io import make_folder, remove_empty_folders, write_text_atomically
from megatron.utils.errors import RunError, UserError
from megatron.utils.project import COMMAND, PROGRAM

SCRIPT, CONFIGURATION = "job.sbatch", "job.yml"
SIGNATURE = "# Submit it again with: sbatch"
"""Line in every script that identifies it as written by this module."""
LAST_RANKS_TIMEOUT = 600  # seconds that ranks have to finish a save after the first has exited


@dataclass(frozen=True)
class SlurmJob:
    """Job to submit."""

    name: str
    folder: Path
    """Folder for the script and the job's output; created if necessary."""
    command: tuple[str, ...]
    """Arguments of ./deepy.py for every process."""
    launch: LaunchOptions
    tasks: int
    """Number of processes that srun starts on each node."""
    nodes: int
    array: str | None = None
    """Indices of a job array; the command reads its own from $SLURM_ARRAY_TASK_ID."""
    requeue: tuple[str, ...] = ()
    """Additional arguments for a requeued job that has a checkpoint to resume from."""
    checkpoints: Path | None = None
    """Folder of these checkpoints."""
    files: tuple[tuple[str, str], ...] = ()
    """Names and contents of files in the folder that the command reads."""


def check_job_environment(launch: LaunchOptions) -> TrainingMachines:
    """Check that the interpreter, the container image and the folders of a job exist, and describe its machines.

    Images that the runtime fetches (`docker://…`, pyxis's `registry#image`) are not checked.

    Raises:
        UserError: one of them is missing.
    """
    slurm = launch.slurm
    if slurm.container is not None and _is_path(slurm.container, slurm.container_runtime):
        _check_exists("slurm.container", slurm.container, "image")
    if slurm.container is not None:
        for mount in slurm.container_mounts:
            _check_exists("slurm.container_mounts", mount.split(":")[0], "file or folder")
    elif slurm.python is not None and os.sep in slurm.python and not os.access(slurm.python, os.X_OK):
        raise UserError(f"slurm.python is {slurm.python}, which does not exist or is not executable", "slurm.python")
    changes_environment = any("WANDB" in line or "NETRC" in line or "source " in line for line in slurm.setup)
    return TrainingMachines(
        is_local=False,
        shares_files=all(mount.split(":")[0] == (mount.split(":") * 2)[1] for mount in slurm.container_mounts),
        shares_python=slurm.container is None and slurm.python is None and not changes_environment,
    )


def _is_path(container: str, runtime: str) -> bool:
    """Return True if an image is a file, or a folder for apptainer, rather than a name that the runtime resolves."""
    if runtime == "pyxis":
        return container.startswith(("/", "./", "../"))
    return "://" not in container


def _check_exists(key: str, path: str, kind: str) -> None:
    if not os.path.exists(os.path.expanduser(path)):
        raise UserError(f"{key}: no such {kind}: {path}", key)


def build_training_job(config: Config) -> SlurmJob:
    """Build the job of a run.

    Raises:
        UserError: the configuration has no run folder.
    """
    save, options, launch = config.checkpoint.save, config.checkpoint, config.launch
    if save is None:
        raise UserError("launcher slurm requires save, the run's folder for script, log and checkpoints")
    folder = Path(save)
    requeue: tuple[str, ...] = ()
    if options.load in (None, save) and not options.rollback and not options.finetune:
        config = config.replace(load=save)  # starts at step 0 if nothing was saved, and resumes after a requeue
    else:
        requeue = (f"load={save}", "finetune=false", "rollback=false")
    return SlurmJob(
        name=folder.name or "train",
        folder=folder,
        command=("train", str(folder / CONFIGURATION)),
        launch=launch,
        tasks=launch.num_gpus or 1,
        nodes=launch.nodes or 1,
        requeue=requeue,
        checkpoints=folder / "checkpoints",
        files=((CONFIGURATION, config.to_yaml()),),
    )


def render_batch_script(job: SlurmJob) -> str:
    slurm, launch = job.launch.slurm, job.launch
    gpus = None if launch.device == "cpu" else ":".join(filter(None, [slurm.gpu_type, str(launch.num_gpus or 1)]))
    number = "%A_%a" if job.array is not None else "%j"
    sbatch_options = {
        "job-name": job.name,
        "array": job.array,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks,
        "gpus-per-node": gpus,
        "cpus-per-task": _count_cores(job),
        "mem": slurm.mem,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "output": f"{str(job.folder).replace('%', '%%')}/slurm-{number}.out",
        "open-mode": "append",
        "signal": f"TERM@{slurm.signal_seconds}",
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in sbatch_options.items() if value is not None]
    options += ["--requeue" if slurm.requeue else "--no-requeue", *(["--exclusive"] if slurm.exclusive else [])]
    again = ""
    lines = [
        "#!/bin/bash",
        f"# Written by {' '.join(shlex.join([PROGRAM, *sys.argv[1:]]).split())}",
        f"{SIGNATURE} {shlex.quote(str(job.folder / SCRIPT))}",
        *(f"#SBATCH {option}" for option in [*options, *slurm.options]),
        "",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        *slurm.setup,
    ]
    if job.requeue:
        pattern = f"{shlex.quote(str(job.checkpoints))}/step_*"
        lines += [
            "# Requeued after saving a checkpoint: resume from it instead of the original starting point.",
            "again=()",
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && compgen -G {pattern} > /dev/null; then',
            f"    again=({shlex.join(job.requeue)})",
            "fi",
        ]
        again = ' "${again[@]}"'
    lines += [
        "# A rank that exits does not stop the others immediately: they may be saving.",
        f"{_build_srun_command(job)}{again}",
        "code=$?",
    ]
    if slurm.requeue:
        job_id = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.array is not None else "$SLURM_JOB_ID"
        lines += [
            "# 143: stopped before the time limit, after saving. 75: a rank hung. Requeue the job.",
            f"if [ $code -eq 143 ] || [ $code -eq 75 ]; then scontrol requeue {job_id}; fi",
        ]
    return "\n".join([*lines, "exit $code", ""])


def _count_cores(job: SlurmJob) -> int | None:
    """Return the CPU cores per task: those of the processes that it starts."""
    cores = job.launch.slurm.cpus_per_task
    return None if cores is None else cores * (job.launch.num_gpus or 1) // job.tasks


def _build_srun_command(job: SlurmJob) -> str:
    """Return the command that starts the ranks, with SLURM variables to be expanded by the shell."""
    slurm = job.launch.slurm
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={LAST_RANKS_TIMEOUT}"]
    if (cores := _count_cores(job)) is not None:  # srun does not inherit it from sbatch since SLURM 22.05
        words.append(f"--cpus-per-task={cores}")
    mounts = list(slurm.container_mounts)
    if slurm.container is not None and slurm.container_runtime == "pyxis":
        words.append(f"--container-image={slurm.container}")
        words += [f"--container-mounts={','.join(m if ':' in m else f'{m}:{m}' for m in mounts)}"] if mounts else []
        words += [f"--container-workdir={os.getcwd()}"]
    elif slurm.container is not None:
        words += ["apptainer", "exec", *([] if job.launch.device == "cpu" else ["--nv"])]
        words += [f"--bind={mount}" for mount in mounts] + [slurm.container]
    words += [slurm.python or (sys.executable if slurm.container is None else "python3"), *COMMAND]
    quoted = [word if word.startswith("--run-index=$") else shlex.quote(word) for word in (*words, *job.command)]
    return " ".join(quoted)


def submit_job(job: SlurmJob) -> str:
    """Write the job's files and submit it with sbatch.

    Returns the job id.

    Raises:
        UserError: sbatch is not available, or the folder cannot be written.
        RunError: sbatch rejected the job, with its message; the written files are removed.
    """
    if shutil.which("sbatch") is None:
        raise UserError("launcher slurm: sbatch not found; submit on a login node, or print the script with --dry-run")
    files = {job.folder / name: text for name, text in (*job.files, (SCRIPT, render_batch_script(job)))}
    created = make_folder("save", job.folder)
    before = {path: path.read_bytes() for path in files if path.is_file()}
    if before and SIGNATURE.encode() not in before.get(job.folder / SCRIPT, b""):
        raise UserError(
            f"save: {next(iter(before))} exists and was not written by an earlier submission; choose another folder, "
            "or move it away"
        )
    for path, text in files.items():
        write_text_atomically(path, text)
    completed = subprocess.run(
        ["sbatch", "--parsable", str(job.folder / SCRIPT)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if completed.returncode != 0:
        for path in files:
            if path in before:
                path.write_bytes(before[path])
            else:
                path.unlink()
        remove_empty_folders(created)
        lines = [line for line in completed.stderr.splitlines() if line.strip()]
        raise RunError("; ".join(line.removeprefix("sbatch: error: ") for line in lines) or "sbatch rejected the job")
    return completed.stdout.split(";")[0].strip()


def describe_submission(job: SlurmJob, job_id: str) -> list[str]:
    """Return lines about a submitted job: its script and log, and how to follow and stop it."""
    processes = f"{job.tasks} process{'es' * (job.tasks > 1)}"
    size = f"{job.nodes} nodes × {processes}" if job.nodes > 1 else processes + " on a node" * (job.tasks > 1)
    folder = shlex.quote(str(job.folder))
    log = f"{folder}/slurm-{job_id}_*.out" if job.array is not None else f"{folder}/slurm-{job_id}.out"
    return [
        f"submitted SLURM job {job_id}: {size}; script {folder}/{SCRIPT}",
        f"queue: squeue -j {job_id}; log, once it runs: tail -f {log}; stop: scancel {job_id}",
    ]


def format_array_indices(numbers: Sequence[int]) -> str:
    """Format ascending numbers in SLURM's short form: 0-3,5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
