"""A hanging rank is named, and the run ends."""

import gc
import json
import logging
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from hanging_rank import HURRIED
from tiny_runs import tiny_config
from torch.distributed import DistError, TCPStore
from torch.distributed.flight_recorder import fr_trace

from megatron.distributed.launcher_environment import find_free_port
from megatron.distributed.process_groups import HeartbeatStore, ProcessGroups
from megatron.training.hang_report import STACKS, RankReport, describe_reports
from megatron.training.metrics_log import HEARTBEAT_FILE
from megatron.training.train import train
from megatron.training.watchdog import Heartbeat, Watchdog, diagnose_hang

SCRIPT = Path(__file__).parents[1] / "support/hanging_rank.py"
TIMEOUT = 5.0


def hang(corpus: Path, folder: Path, late: int, how: str) -> tuple[list[int], list[str], dict[int, str]]:
    """Return exit codes, output and stacks of two ranks, one of which hangs."""
    timeout = 600.0 if how in HURRIED else TIMEOUT  # passes in seconds (hanging_rank.py)
    config = tiny_config(
        corpus, folder / "run", train_iters=6, num_gpus=2, train_micro_batch_size_per_gpu=2, hang_timeout=timeout
    )
    config.save(folder / "config.yml")
    environment = {"MASTER_PORT": str(find_free_port())}
    ranks = [
        Forked(
            SCRIPT, str(folder / "config.yml"), str(rank), "2", str(late), how,
            output=folder / f"{rank}.txt", env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        codes = [child.wait(120) for child in ranks]
    finally:
        for child in ranks:
            child.kill()
    stacks = {int(path.stem[5:]): path.read_text() for path in (folder / "run" / STACKS).glob("rank_*.txt")}
    return codes, [child.printed() for child in ranks], stacks


def error_of(printed: str) -> str:
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    return line


def test_a_rank_that_sleeps(corpus: Path, tmp_path: Path) -> None:
    codes, printed, stacks = hang(corpus, tmp_path, 1, "sleep")
    assert codes == [75, 75]
    assert "rank 1 hangs at step 2 in phase `data` for " in error_of(printed[0])
    assert "while the others are in `reduce`" in error_of(printed[0])
    assert "; rank 0 waits in all_reduce of 4 int64 over gloo among ranks 0-1 (" in error_of(printed[0])
    assert "; rank 1 is at tests/support/hanging_rank.py:" in error_of(printed[0])
    assert "error:" not in printed[1]
    assert "in sleeping" in stacks[1]
    assert "in train_step" in stacks[0]


def test_a_rank_that_holds_pythons_lock(corpus: Path, tmp_path: Path) -> None:
    codes, printed, stacks = hang(corpus, tmp_path, 1, "hold")
    assert codes == [75, 1]  # exit code of faulthandler
    assert "rank 1 hangs at step 2 in phase `data`" in error_of(printed[0])
    assert "in holding" in stacks[1]


def test_a_lone_rank_that_holds_pythons_lock(corpus: Path, tmp_path: Path) -> None:
    """A single rank that holds the interpreter's lock, with no other rank to report it."""
    config = tiny_config(corpus, tmp_path / "run", train_iters=6, hang_timeout=1.0)
    config.save(tmp_path / "config.yml")
    arguments = (str(tmp_path / "config.yml"), "0", "1", "0", "hold")
    rank = Forked(SCRIPT, *arguments, output=tmp_path / "0.txt", env={"MASTER_PORT": str(find_free_port())})
    try:
        assert rank.wait(120) == 1
    finally:
        rank.kill()
    deadline = time.monotonic() + 20  # the companion process prints after the rank has ended
    while "error: " not in rank.printed() and time.monotonic() < deadline:
        time.sleep(0.05)
    reported = error_of(rank.printed())
    assert "rank 0 hangs at step 2 in phase `data` for 2 s (hang_timeout), in native code that holds the" in reported
    assert "in holding" in (tmp_path / "run" / STACKS / "rank_0.txt").read_text()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_stopped(late: int, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other rank reports its own position and the operation it waits in; then the stopped rank writes its
    stacks.
    """
    folder = tmp_path / "run" / STACKS
    folder.mkdir(parents=True)
    (folder / "rank_0.txt").write_text("of an earlier start")
    codes, printed, stacks = hang(corpus, tmp_path, late, "stop")
    assert codes == [75, 75]
    assert "error:" not in printed[late]
    line = error_of(printed[1 - late])
    assert f"rank {late} hangs" in line
    assert "no heartbeat" in line
    assert f"; rank {1 - late} waits in all_reduce of 4 int64 over gloo among ranks 0-1 (" in line
    assert "megatron/training/trainer.py" in line
    assert "train_step)" in line
    assert line.endswith(f"stacks and last collectives of the ranks are in {folder}")
    assert "in train_step" in stacks[1 - late]
    assert "in stopped" in stacks[late]
    assert (folder.with_name("stacks_1") / "rank_0.txt").read_text() == "of an earlier start"
    assert len((folder / "waiting.txt").read_text().splitlines()) == 2

    dumps = {rank: pickle.loads((folder / f"gloo_trace_rank_{rank}").read_bytes())["entries"] for rank in (0, 1)}
    pending = [entry for entry in dumps[1 - late] if not entry["retired"]]
    assert [entry["profiling_name"] for entry in pending] == ["gloo:all_reduce"]
    try:
        with caplog.at_level(logging.INFO, "Flight Recorder"):
            fr_trace.main(["--prefix", "gloo_trace_rank_", str(folder)])
    finally:
        gc.enable()  # torch's reader disables it
    assert f"missing ranks: {{{late}}}" in caplog.text
    assert "collective: gloo:all_reduce" in caplog.text


def test_a_regular_end_leaves_no_stacks(corpus: Path, tmp_path: Path) -> None:
    train(tiny_config(corpus, tmp_path / "run", train_iters=1))
    assert not (tmp_path / "run" / STACKS).exists()
    assert not (tmp_path / "run" / HEARTBEAT_FILE).exists()


def test_a_run_with_data_workers_ends(corpus: Path, tmp_path: Path) -> None:
    """A run with data loader processes ends; they are forked from the rank and inherit its open files."""
    result = train(tiny_config(corpus, tmp_path / "run", num_workers=1, hang_timeout=60))
    assert result.exit_code == 0
    assert not (tmp_path / "run" / STACKS).exists()


def test_a_rank_enters_phases_after_the_first_process_has_ended() -> None:
    """At the end of a run, the first process may exit, and its store with it, while others are still in a phase."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    watchdog = Watchdog(ProcessGroups(), timeout=None, folder=None)
    watchdog._store = HeartbeatStore(ProcessGroups(), client)
    watchdog.enter_phase("step", 1)
    assert watchdog._store.get("beat") == "1 1 step"
    del server
    for phase in ("report", "save", "save"):
        watchdog.enter_phase(phase, 2)
    with pytest.raises(DistError):
        client.set("key", "value")


def test_the_heartbeat_reports_the_progress(tmp_path: Path) -> None:
    watch = Watchdog(ProcessGroups(), timeout=None, folder=tmp_path)
    watch.enter_phase("save", 7)
    watch._write_heartbeat()
    reported: dict[str, Any] = json.loads((tmp_path / HEARTBEAT_FILE).read_text())
    assert (reported["step"], reported["phase"], reported["ranks"]) == (7, "save", 1)
    watch.close()
    assert not (tmp_path / HEARTBEAT_FILE).exists()


@pytest.mark.parametrize(
    ("beats", "silent", "says"),
    [
        ({0: (9, 3, "reduce"), 1: (8, 3, "data"), 2: (9, 3, "reduce")}, set(),
         "rank 1 hangs at step 3 in phase `data` for 60 s (hang_timeout), while the others are in `reduce`"),
        ({0: (9, 3, "step"), 1: (8, 3, "data"), 2: (8, 3, "data")}, set(),
         "ranks 1, 2 hang at step 3 in phase `data` for 60 s (hang_timeout), while the others are in `step`"),
        ({0: (9, 3, "step"), 1: (9, 3, "step")}, set(),
         "all 2 ranks hang at step 3 in phase `step` for 60 s (hang_timeout)"),
        ({0: (9, 3, "step")}, set(), "rank 0 hangs at step 3 in phase `step` for 60 s (hang_timeout)"),
    ],
)  # fmt: skip
def test_the_rank_that_is_behind_is_named(beats: dict[int, tuple[int, int, str]], silent: set[int], says: str) -> None:
    assert diagnose_hang({rank: Heartbeat(*beat) for rank, beat in beats.items()}, silent, 60.0) == says


def test_a_silent_rank_is_named_before_a_waiting_rank() -> None:
    beats = {0: Heartbeat(9, 3, "reduce"), 1: Heartbeat(9, 3, "reduce"), 2: Heartbeat(8, 3, "data")}
    assert diagnose_hang(beats, {1}, 60.0).startswith("rank 1 hangs at step 3 in phase `reduce`")
    assert "no heartbeat" in diagnose_hang(beats, {1}, 60.0)
    assert Heartbeat.parse(str(Heartbeat(3, 4, "forward and backward"))) == Heartbeat(3, 4, "forward and backward")


def test_the_operation_with_the_fewest_ranks_is_reported() -> None:
    waits = RankReport("megatron/training/engine.py:1 step", "all_reduce of 4 int64 over gloo among ranks 0-3", 3)
    reported = describe_reports({0: waits, 1: waits, 2: RankReport("megatron/data/torch_data.py:2 next"), 3: waits})
    assert reported == [
        "rank 2 is at megatron/data/torch_data.py:2 next",
        "ranks 0-1,3 wait in all_reduce of 4 int64 over gloo among ranks 0-3, with 2 more pending "
        "(megatron/training/engine.py:1 step)",
    ]
