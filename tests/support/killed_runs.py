"""Runs that are killed repeatedly: `killed_runs.py JOB WORLD KILLS SEED`, for `test_kills.py` and manual use.

The imports take seconds, so they are done once. Every start of a run is a fork of this process: it joins the others as
rank r of WORLD, trains the configuration JOB/config.yml, and dies. Half of the deaths occur at a random time within the
usual duration: by SIGKILL, or by one or two SIGTERMs, the first of which lets a run save. The other half are SIGKILLs
immediately before a random file operation (the n-th file opened for writing, folder created, rename or removal), many
of which occur in saves. The same command resumes in the same folder until the run ends; then the next run starts.
JOB/whole is the undisturbed run, JOB/run_0, run_1 and so on are the others, and JOB/deaths.json records the KILLS
deaths.
"""

import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.distributed.launcher_environment import find_free_port

SIGNALS = ([signal.SIGKILL], [signal.SIGTERM], [signal.SIGKILL], [signal.SIGTERM, signal.SIGTERM])
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile")


def count_operations(run: Path, last: int | None, report: Path) -> None:
    """Count the file operations of this process on a run, and die immediately before number `last`.

    With `last` = −1 it never dies, and the report contains the number of operations.
    """
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not str(arguments[0]).startswith(str(run)):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        seen[0] += 1
        if seen[0] == last or last == -1:
            descriptor = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            what = str(seen[0]) if last == -1 else f"{event} {os.path.relpath(str(arguments[0]), run)}"
            os.write(descriptor, what.encode())
            os.close(descriptor)
        if seen[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def live(job: Path, rank: int, world_size: int, port: int, last: int | None) -> None:
    """Run one rank from start to death, in a separate process."""
    from megatron.config.load import read_config
    from megatron.training.train import train

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    log = os.open(job / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    config = read_config(job / "life.yml")
    if rank == 0:
        count_operations(Path(config.checkpoint.save or ""), last, job / "operations.txt")
    try:
        code = train(config).exit_code
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(code)


def run_until_killed(
    job: Path,
    world_size: int,
    *,
    seconds: float | None = None,
    signals: list[int] | None = None,
    operation: int | None = None,
) -> list[int]:
    """Start all ranks, send the signals after some seconds, and kill all ranks once one has died.

    Returns the exit codes, negative for signals.
    """
    port, children = find_free_port(), []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            live(job, rank, world_size, port, operation)
        children.append(child)
    start_time, codes = time.monotonic(), {}
    while len(codes) < world_size:
        for child in children:
            if child not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if seconds is not None and time.monotonic() - start_time > seconds:
            for number in signals or []:
                for child in set(children) - set(codes):
                    os.kill(child, number)
                time.sleep(0.02)
            seconds = None
        if any(code != 0 for code in codes.values()):
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[child] for child in children]


def main() -> None:
    job, world, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    from megatron.config.load import read_config

    drawn, config = random.Random(seed), read_config(job / "config.yml")

    def life(name: str, **death: Any) -> list[int]:
        folder = str(job / name)
        config.replace(save=folder, load=folder).save(job / "life.yml")
        return run_until_killed(job, world, **death)

    start_time = time.monotonic()
    assert life("whole", operation=-1) == [0] * world, (job / "log.txt").read_text()[-3000:]
    usual, operations = time.monotonic() - start_time, int((job / "operations.txt").read_text())
    deaths: list[dict[str, Any]] = []
    run, ended = 0, False
    while len(deaths) < kills or not ended:
        run += ended
        death: dict[str, Any] = {}
        if len(deaths) < kills:
            if len(deaths) % 2:
                death = {"seconds": drawn.uniform(0.1, 1) * usual, "signals": SIGNALS[len(deaths) // 2 % len(SIGNALS)]}
            else:
                death = {"operation": drawn.randint(1, operations)}
        codes = life(f"run_{run}", **death)
        ended = all(code == 0 for code in codes)
        if not ended:
            reported = {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
            assert reported & set(codes), (codes, (job / "log.txt").read_text()[-3000:])
            last = (job / "operations.txt").read_text() if "operation" in death else None
            there = sorted(path.name for path in (job / f"run_{run}" / "checkpoints").glob("*"))
            deaths.append({"run": run, **death, "before": last, "checkpoints": there})
    about = {
        "kills": len(deaths),
        "runs": run + 1,
        "seconds": round(time.monotonic() - start_time, 1),
        "deaths": deaths,
    }
    (job / "deaths.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
