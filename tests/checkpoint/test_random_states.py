"""Random states go to a file and come back, without a pickle."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import random_states
from megatron.errors import RunError


def draw() -> tuple[object, ...]:
    numpy = np.random.rand(), np.random.randn()
    return random.random(), random.gauss(0, 1), *numpy, torch.rand(1).item(), torch.randn(3).tolist()


def test_what_was_captured_comes_back(tmp_path: Path) -> None:
    draw()  # an odd number of Gaussians: their second halves wait inside the generators
    random_states.write(tmp_path, rank=3)
    expected = draw()
    assert draw() != expected
    random_states.read(tmp_path, rank=3)
    assert draw() == expected


def test_a_rank_that_has_none_is_told_so(tmp_path: Path) -> None:
    random_states.write(tmp_path, rank=0)
    state = torch.get_rng_state()
    with pytest.raises(RunError, match=r"rank_00001\.pt: is missing"):
        random_states.read(tmp_path, rank=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_damage_is_named(tmp_path: Path) -> None:
    path = random_states.write(tmp_path, rank=0)
    path.write_bytes(b"not a file of torch")
    with pytest.raises(RunError, match=r"rank_00000\.pt: is damaged, or holds more than tensors"):
        random_states.read(tmp_path, rank=0)
    torch.save({"python": 3}, path)
    with pytest.raises(RunError, match=r"rank_00000\.pt: does not hold the random states of a process"):
        random_states.read(tmp_path, rank=0)
