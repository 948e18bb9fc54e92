"""`launcher: slurm`: work as a job, by a batch script that a person can read, change and submit again.

    FOLDER/job.sbatch      the script
    FOLDER/job.yml         a run's configuration, which the script's command reads
    FOLDER/slurm-17.out    what job 17 prints, all its starts one after the other

srun starts the ranks, which find their ranks in its environment (`megatron.distributed.launcher_environment`). Nothing
traps signals: `--signal=TERM@S` reaches the ranks, which save and leave with 143; srun passes that on, and the script
puts its job back into the queue. A preemption does the same without the script.
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
from megatron.utils.atomic_io import make_folder, remove_empty_folders, write_text_atomically
from megatron.utils.errors import RunError, UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, CONFIGURATION = "job.sbatch", "job.yml"
SIGNATURE = "# Submit it again with: sbatch"
"""In every script: by it a script is known as one that was written here."""
LAST_RANKS_TIMEOUT = 600  # seconds that ranks have after the first has ended: to finish a save


@dataclass(frozen=True)
class SlurmJob:
    """What is to run, and where."""

    name: str
    folder: Path
    """For the script and what the job prints; made if it is not there."""
    command: tuple[str, ...]
    """Arguments of ./deepy.py for every process."""
    launch: LaunchOptions
    tasks: int
    """Processes that srun starts on each node."""
    nodes: int
    array: str | None = None
    """Indices of a job array; the command finds its own in $SLURM_ARRAY_TASK_ID."""
    requeue: tuple[str, ...] = ()
    """Further arguments once a job that was requeued has a checkpoint to go on from."""
    checkpoints: Path | None = None
    """Where that is."""
    files: tuple[tuple[str, str], ...] = ()
    """Names and contents of files that the command reads, in the folder."""


def build_training_job(config: Config) -> SlurmJob:
    """A run as a job.

    Raises:
        UserError: the configuration names no folder for it.
    """
    save, options, launch = config.checkpoint.save, config.checkpoint, config.launch
    if save is None:
        raise UserError("launcher slurm needs save, the run's folder: script, log and checkpoints go there")
    folder = Path(save)
    requeue: tuple[str, ...] = ()
    if options.load in (None, save) and not options.rollback:
        config = config.replace(load=save)  # begins at step 0 where there is nothing yet, and goes on after a requeue
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


def check_job_environment(launch: LaunchOptions) -> None:
    """Check that the interpreter, the container image and the folders that a job names are there.

    An image that its runtime fetches (`docker://…`, pyxis's `registry#image`) is left to the job.

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
        raise UserError(f"slurm.python is {slurm.python}, which is not there or cannot be run", "slurm.python")


def _is_path(container: str, runtime: str) -> bool:
    """Return whether an image is a file, or for apptainer a folder, and not a name that the runtime resolves."""
    if runtime == "pyxis":
        return container.startswith(("/", "./", "../"))
    return "://" not in container


def _check_exists(key: str, path: str, kind: str) -> None:
    if not os.path.exists(os.path.expanduser(path)):
        raise UserError(f"{key}: no such {kind}: {path}", key)


def moves_folders(launch: LaunchOptions) -> bool:
    """Return whether a job sees folders under other paths than this machine does."""
    return any(mount.split(":")[0] != (mount.split(":") * 2)[1] for mount in launch.slurm.container_mounts)


def has_own_python(launch: LaunchOptions) -> bool:
    """Return whether a job computes with this Python and its environment: its packages and logins are those here."""
    slurm = launch.slurm
    changes_environment = any("WANDB" in line or "NETRC" in line or "source " in line for line in slurm.setup)
    return slurm.container is None and slurm.python is None and not changes_environment


def render_batch_script(job: SlurmJob) -> str:
    """The batch script."""
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
        f"# Written by {' '.join(shlex.join(['./deepy.py', *sys.argv[1:]]).split())}",
        f"{SIGNATURE} {shlex.quote(str(job.folder / SCRIPT))}",
        *(f"#SBATCH {option}" for option in [*options, *slurm.options]),
        "",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        *slurm.setup,
    ]
    if job.requeue:
        pattern = f"{shlex.quote(str(job.checkpoints))}/step_*"
        lines += [
            "# Started before, and saved: go on from there, not from where the first start began.",
            "again=()",
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && compgen -G {pattern} > /dev/null; then',
            f"    again=({shlex.join(job.requeue)})",
            "fi",
        ]
        again = ' "${again[@]}"'
    lines += [
        "# A rank that ends does not end the others at once: they may be saving.",
        f"{_build_srun_command(job)}{again}",
        "code=$?",
    ]
    if slurm.requeue:
        job_id = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.array is not None else "$SLURM_JOB_ID"
        lines += [
            "# 143: told to stop (the time limit is near), and saved. 75: a rank hung. Back into the queue.",
            f"if [ $code -eq 143 ] || [ $code -eq 75 ]; then scontrol requeue {job_id}; fi",
        ]
    return "\n".join([*lines, "exit $code", ""])


def _count_cores(job: SlurmJob) -> int | None:
    """CPU cores of each task: those of the processes that it is or will start."""
    cores = job.launch.slurm.cpus_per_task
    return None if cores is None else cores * (job.launch.num_gpus or 1) // job.tasks


def _build_srun_command(job: SlurmJob) -> str:
    """The command that starts the ranks; with SLURM's variables left for the shell."""
    slurm = job.launch.slurm
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={LAST_RANKS_TIMEOUT}"]
    if (cores := _count_cores(job)) is not None:  # srun does not take it from sbatch since SLURM 22.05
        words.append(f"--cpus-per-task={cores}")
    mounts = list(slurm.container_mounts)
    if slurm.container is not None and slurm.container_runtime == "pyxis":
        words.append(f"--container-image={slurm.container}")
        words += [f"--container-mounts={','.join(m if ':' in m else f'{m}:{m}' for m in mounts)}"] if mounts else []
        words += [f"--container-workdir={os.getcwd()}"]
    elif slurm.container is not None:
        words += ["apptainer", "exec", *([] if job.launch.device == "cpu" else ["--nv"])]
        words += [f"--bind={mount}" for mount in mounts] + [slurm.container]
    words += [slurm.python or (sys.executable if slurm.container is None else "python3"), str(ROOT / "deepy.py")]
    quoted = [word if word.startswith("--member=$") else shlex.quote(word) for word in (*words, *job.command)]
    return " ".join(quoted)


def submit_job(job: SlurmJob) -> str:
    """Write the job's files and hand it to sbatch. Returns its number.

    Raises:
        UserError: there is no sbatch here, or the folder cannot be written.
        RunError: sbatch refused the job, in its own words; nothing of it is left.
    """
    if shutil.which("sbatch") is None:
        raise UserError("launcher slurm: there is no sbatch here; submit on a login node, or look with --dry-run")
    created = make_folder("save", job.folder)
    files = {job.folder / name: text for name, text in (*job.files, (SCRIPT, render_batch_script(job)))}
    before = {path: path.read_bytes() for path in files if path.is_file()}
    if before and SIGNATURE.encode() not in before.get(job.folder / SCRIPT, b""):
        raise UserError(
            f"save: {next(iter(before))} is there, and no earlier submission wrote it; choose another folder, or move "
            "it away"
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
        raise RunError("; ".join(line.removeprefix("sbatch: error: ") for line in lines) or "sbatch refused the job")
    return completed.stdout.split(";")[0].strip()


def describe_submission(job: SlurmJob, job_id: str) -> list[str]:
    """What to tell about a submitted job: where its script and log are, how to follow and to stop it."""
    task = f"{job.nodes} nodes × {job.tasks} processes" if job.nodes > 1 else f"{job.tasks} processes on a node"
    size = task if job.tasks > 1 or job.nodes > 1 else "1 process"
    folder = shlex.quote(str(job.folder))
    log = f"{folder}/slurm-{job_id}_*.out" if job.array is not None else f"{folder}/slurm-{job_id}.out"
    return [
        f"submitted SLURM job {job_id}: {size}; script {folder}/{SCRIPT}",
        f"queue: squeue -j {job_id}; log, once it runs: tail -f {log}; stop: scancel {job_id}",
    ]


def format_array_indices(numbers: Sequence[int]) -> str:
    """Rising numbers in SLURM's short form: 0-3,5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
