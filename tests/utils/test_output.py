"""A run whose output is no longer read stops in good order."""

import io
import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import ROOT, Forked
from tiny_runs import tiny_config, write_corpora

from megatron.checkpoint import layout
from megatron.distributed.hardware import LocalHardware
from megatron.launch import local_launcher
from megatron.training.resolve_run import resolve_run
from megatron.utils.console import GuardedStream, set_ascii_fallback
from megatron.utils.errors import RunError
from megatron.utils.signals import GracefulStop


def unread_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_character_can_be_written_to_every_terminal(encoding: str) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # strict, like standard output
    set_ascii_fallback(shown)
    shown.write("é² … 2−1 → θ, Σ_{t≤j} 中 \udce9")
    shown.flush()
    assert shown.buffer.getvalue() == {
        "ascii": b"e^2 ... 2-1 -> theta, Sigma_{t<=j} \\u4e2d \xe9",
        "latin-1": b"\xe9\xb2 ... 2-1 -> theta, Sigma_{t<=j} \\u4e2d \xe9",
        "utf-8": "é² … 2−1 → θ, Σ_{t≤j} 中 ".encode() + b"\xe9",
    }[encoding]  # fmt: skip


def test_stream_settings_of_users_are_kept() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="ignore")
    set_ascii_fallback(shown)
    assert shown.errors == "ignore"


@pytest.mark.parametrize("place", ["pipe", "/dev/full"])
def test_a_failed_write_requests_one_stop(place: str) -> None:
    with GracefulStop() as stop, open(unread_pipe() if place == "pipe" else place, "w") as file:
        stream = GuardedStream(file)
        assert stream.encoding == file.encoding
        assert not stream.isatty()
        for _ in range(3):  # a second request would end the process
            assert stream.write("step 1\n") == 7
            stream.flush()
    assert stop.signal == signal.SIGTERM
    assert stream.problem == (None if place == "pipe" else "No space left on device")


@pytest.mark.parametrize(("place", "why"), [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")])
def test_without_a_training_to_ask_it_is_an_error(place: str, why: str) -> None:
    with open(unread_pipe() if place == "pipe" else place, "w") as file:
        stream = GuardedStream(file)
        with pytest.raises(RunError, match=rf"^standard output: {why}; no step was taken$"):
            print("resumes from step 7", file=stream, flush=True)


def test_a_failure_in_another_thread_stops_the_training_that_follows() -> None:
    """A thread that announces slow imports may be the first to find the disk full; its exception ends nothing."""
    with open("/dev/full", "w") as file:
        stream = GuardedStream(file)
        with ThreadPoolExecutor(1) as threads:
            announced = threads.submit(print, "importing torch", file=stream, flush=True)
            assert isinstance(announced.exception(), RunError)
        with GracefulStop() as stop:
            print("4 steps", file=stream, flush=True)
        assert stop.signal == signal.SIGTERM


@pytest.mark.parametrize("ranks", [1, 2])
def test_output_to_a_full_disk_is_reported(ranks: int, tmp_path: Path) -> None:
    config = tiny_config(write_corpora(tmp_path / "corpus"), tmp_path / "run", train_iters=2000)
    errors = tmp_path / "errors.txt"
    config_file = tmp_path / "t.yml"
    config_file.write_text(config.to_yaml(only_set=True))
    words = ("train", str(config_file), f"num_gpus={ranks}", f"train_micro_batch_size_per_gpu={4 // ranks}")
    child = Forked(ROOT / "deepy.py", *words, cwd=tmp_path, output=Path("/dev/full"), errors=errors)
    try:
        code = child.wait(60)
    finally:
        child.kill()
    reported = [line for line in errors.read_text().splitlines() if not line.startswith("note: ")]
    assert (code, len(reported)) == (1, 1), reported
    assert re.fullmatch(r"error: standard output: No space left on device; stopped at step \d+, .*saved", reported[0])


def test_a_run_with_a_closed_output_saves_and_ends(tmp_path: Path) -> None:
    """`./deepy.py train … | head` ends as after SIGTERM, and the log contains every line."""
    config = tiny_config(write_corpora(tmp_path / "corpus"), tmp_path / "run", train_iters=2000)
    output, (reader, writer) = os.dup(1), os.pipe()

    def head() -> None:
        with open(reader, encoding="utf-8") as lines:
            next(line for line in lines if line.strip().startswith("step"))

    threading.Thread(target=head).start()
    os.dup2(writer, 1)
    try:
        code = local_launcher.train_on_this_machine(resolve_run(config, LocalHardware.detect()))
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(writer)
    assert code == 143
    checkpoint = layout.find_latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    step = json.loads((checkpoint / "progress.json").read_text())["step"]
    assert 1 <= step < 2000
    assert f"stopped by SIGTERM at step {step} of 2000; saved {checkpoint}" in (tmp_path / "run/log.txt").read_text()
