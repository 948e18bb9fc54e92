"""A run that nobody watches any more stops in good order."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from tiny_runs import tiny_config, write_corpora

from megatron.checkpoint import folder
from megatron.launch import local
from megatron.launch.streams import StoppingStream
from megatron.parallel.devices import Machine
from megatron.training.preflight import preflight


def unread_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("place", ["pipe", "/dev/full"])
def test_what_cannot_be_written_asks_once_to_stop(place: str) -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        with open(unread_pipe() if place == "pipe" else place, "w") as file:
            stream = StoppingStream(file)
            assert stream.encoding == file.encoding
            assert not stream.isatty()
            for _ in range(3):
                assert stream.write("step 1\n") == 7
                stream.flush()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM]


def test_a_run_whose_output_nobody_reads_saves_and_ends(tmp_path: Path) -> None:
    """`./deepy.py train … | head`: as after SIGTERM, and the log has every line."""
    config = tiny_config(write_corpora(tmp_path / "corpus"), tmp_path / "run", train_iters=2000)
    output, (reader, writer) = os.dup(1), os.pipe()

    def head() -> None:
        with open(reader, encoding="utf-8") as lines:
            next(line for line in lines if line.strip().startswith("step"))

    threading.Thread(target=head).start()
    os.dup2(writer, 1)
    try:
        code = local.train(preflight(config, Machine.here()))
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(writer)
    assert code == 143
    checkpoint = folder.newest(tmp_path / "run")
    assert checkpoint is not None
    step = json.loads((checkpoint / "progress.json").read_text())["step"]
    assert 1 <= step < 2000
    assert f"stopped by signal 15 at step {step} of 2000; saved {checkpoint}" in (tmp_path / "run/log.txt").read_text()
