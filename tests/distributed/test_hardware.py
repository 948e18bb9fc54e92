"""Counting of GPUs without torch."""

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.distributed import hardware


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: without one both would count none")
def test_agrees_with_torch():
    assert hardware.count_gpus() == torch.cuda.device_count() > 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Machine with a CUDA build of torch, no GPU in /dev and no tool, unless a test changes it."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(hardware, "DEVICE_FOLDER", tmp_path / "dev")
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_gpus_are_counted_by_device_files(machine):
    assert hardware.count_gpus() == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "dri"):
        (machine / "dev" / name).touch()
    assert hardware.count_gpus() == 3


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("echo 'GPU 0: H100 (UUID: GPU-1)'\necho '  MIG 1g.10gb'\necho 'GPU 1: H100 (UUID: GPU-2)'", 2),
        ("echo 'No devices were found'", 0),
        ("echo 'GPU 0: broken'\nexit 9", 0),
    ],
)
def test_gpus_are_queried_with_the_tool_without_device_files(machine, script, count):
    tool = machine / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert hardware.count_gpus() == count


@pytest.mark.parametrize(
    ("script", "memory"),
    [
        (
            "[ \"$1 $2\" = '--query-gpu=memory.total --format=csv,noheader,nounits' ] && echo 40960; echo 81920",
            80 << 30,
        ),
        ("echo '[N/A]'", None),
        ("echo 81920; exit 9", None),
        ("true", None),
    ],
)
def test_the_memory_of_the_largest_gpu_is_queried(machine, script, memory):
    assert hardware.detect_gpu_memory() is None
    tool = machine / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert hardware.detect_gpu_memory() == memory
    (machine / "dev" / "nvidia0").touch()
    assert hardware.LocalHardware.detect().gpu_memory == memory


@pytest.mark.parametrize(("cuda", "has"), [("'13.0'", True), ("None", False)])
def test_the_torch_version_is_read_without_importing_it(monkeypatch, tmp_path, cuda, has):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch" / "version.py").write_text(f"hip = '6'\ncuda: Optional[str] = {cuda}\n")
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: spec)
    assert hardware.torch_has_cuda() == has


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
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(hardware, "_count_installed_gpus", lambda: 4)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.count_gpus() == count


def test_torch_built_without_cuda_has_no_gpus(monkeypatch):
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    monkeypatch.setattr(hardware, "_count_installed_gpus", lambda: 4)
    assert hardware.count_gpus() == 0
    monkeypatch.undo()
    assert hardware.torch_has_cuda() == (torch.version.cuda is not None)


def test_cores():
    assert 1 <= hardware.count_cores() <= (os.cpu_count() or 1)


def test_does_not_import_torch():
    code = "import sys; from megatron.distributed.hardware import *; count_gpus(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], check=True)
