"""The comparison of trainings with and without CUDA graphs, on the null device."""

import signal
from pathlib import Path

import pytest

from megatron.training.trainer import Trainer
from megatron.utils.signals import GracefulStop
from tools.bench import graph_training


def test_an_interruption_ends_a_training_at_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stops gracefully by default; a benchmark would record times of steps that it did not take."""
    train_step, steps = Trainer.train_step, list[int]()

    def be_interrupted(self: Trainer, stop: GracefulStop) -> bool:
        steps.append(len(steps))
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return train_step(self, stop)

    monkeypatch.setattr(Trainer, "train_step", be_interrupted)
    config = graph_training.build_config("kerple_log", "off", "tiny", 128, 1, corpus)
    with pytest.raises(KeyboardInterrupt):
        graph_training.train(config, 3)
    assert len(steps) == 2
