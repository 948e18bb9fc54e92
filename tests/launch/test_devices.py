"""Counting GPUs without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.launch import devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: without one both would count none")
def test_agrees_with_torch():
    assert devices.count_gpus() == torch.cuda.device_count() > 0


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        ("0,9,1", 1),
        ("0,-1,1", 1),
        ("GPU-5a,GPU-6b", 2),
        ("MIG-1", 1),
    ],
)
def test_visible_devices(monkeypatch, visible, count):
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "_installed_gpus", lambda: 4)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.count_gpus() == count


def test_torch_built_without_cuda_has_no_gpus(monkeypatch):
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    monkeypatch.setattr(devices, "_installed_gpus", lambda: 4)
    assert devices.count_gpus() == 0
    monkeypatch.undo()
    assert devices._torch_has_cuda() == (torch.version.cuda is not None)


def test_cores():
    assert 1 <= devices.count_cores() <= (os.cpu_count() or 1)


def test_does_not_import_torch():
    code = "import sys; from megatron.launch import devices; devices.count_gpus(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], check=True)
