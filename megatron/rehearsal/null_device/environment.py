"""Environment variables of a child process that runs on the null device."""

import os
from collections.abc import Mapping
from pathlib import Path

from megatron.rehearsal.null_device.build import build_null_device
from megatron.rehearsal.null_device.gpu_models import GpuModel
from megatron.utils.project import PACKAGES_FOLDER

DEVICE_VARIABLE = "FARFIELD_NULL_DEVICE"
"""Emulated GPU, read by `native/memory.c`. If set, the null device is active in the child process."""
LEDGER_VARIABLE = "FARFIELD_NULL_DEVICE_LEDGER"
"""Folder to which each rank writes its ledger and its summary."""
SINGLE_RANK_VARIABLE = "FARFIELD_NULL_DEVICE_LONE_RANK"
"""Set if the process is a single rank of a job whose other ranks do not run."""

VOID_RESULTS = "the null device computes nothing: its losses, times and output files are meaningless"

HERE = Path(__file__).parent


def build_environment(
    card: GpuModel,
    *,
    devices: int = 1,
    ledger: Path | None = None,
    is_single_rank: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build the environment of a child process that runs on the null device.

    Args:
        card: GPU that each device emulates.
        devices: number of devices of the node.
        ledger: folder for the records of each rank (`recorder.py`, `library.py`); None writes none.
        is_single_rank: True if the child is one of many ranks (by torchrun's variables) and the others do not run.
        base: environment to extend; by default this process's.

    Raises:
        UserError: if the null device cannot be built on this machine.
    """
    device = build_null_device()
    environment = dict(os.environ if base is None else base)
    fields = {
        "memory": card.memory,
        "major": card.capability[0],
        "minor": card.capability[1],
        "processors": card.processors,
        "block_shared": card.block_shared,
        "shared": card.shared,
        "l2": card.l2,
        "devices": devices,
    }
    name = f"{card.device_name} (null device)"  # appears in every record made on the null device
    environment[DEVICE_VARIABLE] = ";".join([name, *(f"{key}={value}" for key, value in fields.items())])
    _prepend(environment, "LD_PRELOAD", str(device.library), " ")
    _prepend(environment, "LD_LIBRARY_PATH", str(device.folder))
    _prepend(environment, "PATH", str(HERE / "bin"))
    _prepend(environment, "PYTHONPATH", f"{HERE / 'site'}{os.pathsep}{PACKAGES_FOLDER}")
    environment["TRITON_LIBCUDA_PATH"] = str(device.folder)
    # Inductor's own launcher looks up driver functions by itself; without it, kernels are launched through Triton.
    environment["TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER"] = "0"
    for variable, value in ((LEDGER_VARIABLE, ledger), (SINGLE_RANK_VARIABLE, "1" if is_single_rank else None)):
        environment.pop(variable, None)
        if value is not None:
            environment[variable] = str(value)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def _prepend(environment: dict[str, str], variable: str, value: str, separator: str = os.pathsep) -> None:
    before = environment.get(variable)
    environment[variable] = value if not before else f"{value}{separator}{before}"
