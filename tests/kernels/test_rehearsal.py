"""Kernel tests use the device of their fixture; rehearsed without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rehearsal
import torch

from megatron.kernels.biased_attention.op import biased_attention

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run on the GPU")
@pytest.mark.skipif("FARFIELD_REHEARSE_DEVICE" in os.environ, reason="this is the rehearsal")
def test_kernel_tests_pass_tensors_on_the_kernels_device() -> None:
    command = [sys.executable, "-m", "pytest", "tests/kernels", "-p", "no:cacheprovider", "--tb=line"]
    environment = os.environ | {"FARFIELD_REHEARSE_DEVICE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(".") > 30, "tests with the fixture `device` were not found"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")
def test_the_rehearsal_finds_a_tensor_on_the_cpu_and_ends_at_a_number() -> None:
    elsewhere = torch.zeros(1, 2, 8, 16, device=rehearsal.DEVICE)
    ended = True
    with rehearsal.on_another_device():
        assert biased_attention(elsewhere, elsewhere, elsewhere).shape == elsewhere.shape
        assert elsewhere.sum() == 0
        ended = False
    assert ended
    here = torch.zeros(1, 2, 8, 16)
    with pytest.raises(AssertionError, match="was given tensors on the CPU"), rehearsal.on_another_device():
        biased_attention(here, here, here)
