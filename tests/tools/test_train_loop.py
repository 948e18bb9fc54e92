"""Training benchmark: a signal ends it, and steps that are not taken are not timed."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.utils.signals import GracefulStop
from tools.bench import train_loop


class Loop:
    """Replacement of the training loop: one step, or none after a stop request."""

    taken = 0

    def __init__(self, signal_at: int | None, number: int) -> None:
        self.signal_at, self.number, self.closed = signal_at, number, False
        self.run = SimpleNamespace(
            vocabulary=SimpleNamespace(size=8), engine=SimpleNamespace(model=torch.nn.Linear(1, 1)), close=self.close
        )

    def train_step(self, stop: GracefulStop) -> bool:
        if stop.signal is not None:
            return False
        self.taken += 1
        if self.taken == self.signal_at:
            os.kill(os.getpid(), self.number)
        return True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_the_records_so_far(
    number: int,
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loops = {"rotary": Loop(None, number), "cdape": Loop(4, number)}
    plain = SimpleNamespace(step=lambda: None, model=torch.nn.Linear(1, 1))
    monkeypatch.setattr(train_loop, "prepare_corpus", lambda sources, folder: None)
    monkeypatch.setattr(train_loop, "build_trainer", lambda shape, method, corpus: loops[method])
    monkeypatch.setattr(train_loop, "PlainTrainer", lambda *_: plain)
    words = ("--shapes", "medium", "--methods", "rotary,cdape", "--blocks", "9", "--json", str(tmp_path / "a.json"))
    assert command(train_loop, *words) == 128 + number
    assert loops["rotary"].taken == 10
    assert loops["cdape"].taken == 4
    assert all(loop.closed for loop in loops.values())
    records = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert [record["method"] for record in records] == ["rotary"]
    output = capsys.readouterr()
    assert output.err == f"stopped by {signal.Signals(number).name}\n"
    assert [line.split()[1] for line in output.out.splitlines()] == ["method", "rotary"]


def test_it_rejects_other_arguments(refuses: Callable[..., None]) -> None:
    refuses(train_loop, "--shapes", "quickstart,tiny", says="'tiny' is not one of quickstart, medium")
