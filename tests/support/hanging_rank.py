"""One rank of a run in which a rank hangs: `hanging_rank.py CONFIG RANK WORLD LATE HOW`.

In step 2, rank LATE hangs in the way HOW while it reads its data: sleep, stop (SIGSTOP), hold (the interpreter's lock,
in C), or die (SIGKILL). With `slow` nothing hangs, but each step takes `SLOW` seconds longer: rank LATE computes and
the others wait for data.

If a rank sleeps or is stopped, hang_timeout may be long, so that a slow machine is not mistaken for a hang. The
watchdog's clock then runs `HURRY` times as fast once that rank hangs and the other waits for it.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


SLOW = 0.3
HURRY = 120
HURRIED = ("sleep", "stop")


class HurriedClock:
    """Replacement of Python's `time` whose monotonic clock speeds up once certain files exist."""

    def __init__(self, files: list[Path]) -> None:
        self._files, self._since = files, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        now = time.monotonic()
        if not self._since and all(file.exists() for file in self._files):
            self._since = now
        return now + (HURRY * (now - self._since) if self._since else 0.0)


def waiting(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(SLOW)
        yield batch


def hanging(batches: Iterator[Any], how: str, sign: Path) -> Iterator[Any]:
    for step, batch in enumerate(batches):
        if step == 2:
            sign.touch()
            {"sleep": sleeping, "stop": stopped, "hold": holding, "die": killed}[how]()
        yield batch


def sleeping() -> None:
    time.sleep(600)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hurry_when_late(config: Path, is_late: bool) -> None:
    """Make a minute take half a second from the moment the late rank is about to hang and the other about to wait."""
    from megatron.training import watchdog

    files = [config.with_name(name) for name in ("late", "waits")]
    watchdog.time = HurriedClock(files)  # type: ignore[assignment]
    usual_init, usual_phase = watchdog.Watchdog.__init__, watchdog.Watchdog.enter_phase

    def init(self: Any, *args: Any, **keys: Any) -> None:
        usual_init(self, *args, **keys)
        self._poll_interval, self._silence = 0.25, 3.0 * HURRY

    def enter_phase(self: Any, phase: str, step: int) -> None:
        usual_phase(self, phase, step)
        if step == 2 and phase == "reduce" and not is_late:
            files[1].touch()

    watchdog.Watchdog.__init__, watchdog.Watchdog.enter_phase = init, enter_phase  # type: ignore[method-assign]


def holding() -> None:
    """Wait in C for a mutex that is never released, with the interpreter's lock held and without CPU use."""
    lock, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # zeros are an unlocked mutex
    for _ in range(2):
        c.pthread_mutex_lock(lock)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    config, rank, world, late, how = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1")

    from megatron.config.load import read_config
    from megatron.training import train

    prepare = train.build_training_run

    def prepared(*given: Any) -> Any:
        run = prepare(*given)
        if how == "slow" and rank == late:
            run.engine.model.decoder.final_layernorm.register_forward_pre_hook(lambda *inputs: time.sleep(SLOW))
        elif how == "slow":
            run.batches = waiting(run.batches)
        elif rank == late:
            run.batches = hanging(run.batches, how, Path(config).with_name("late"))
        return run

    train.build_training_run = prepared
    if how in HURRIED:
        hurry_when_late(Path(config), rank == late)
    train.train(read_config(Path(config)))


if __name__ == "__main__":
    main()
