"""Corpus and finished run; files that need another run define a fixture with the same name."""

from pathlib import Path

import pytest
from tiny_runs import tiny_config

from megatron.training.train import train


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of four steps with checkpoints at 2 and 4."""
    run = tmp_path_factory.mktemp("run") / "trained"
    train(tiny_config(corpus, run, checkpoint_factor=2))
    return run
