"""What a child process needs in its environment to run on the null device."""

import os
from collections.abc import Mapping
from pathlib import Path

from megatron.rehearsal.null_device.build import build_null_device
from megatron.rehearsal.null_device.cards import Card

DEVICE_VARIABLE = "FARFIELD_NULL_DEVICE"
"""The card, read by `native/memory.c`; that it is there switches the null device on in a child."""
LEDGER_VARIABLE = "FARFIELD_NULL_DEVICE_LEDGER"
"""The folder in which each rank leaves its ledger and its summary."""
LONE_RANK_VARIABLE = "FARFIELD_NULL_DEVICE_LONE_RANK"
"""Set where one process is a rank of a job whose other ranks are not there."""

VOID_RESULTS = "the null device computes nothing: losses, times and files that come of it mean nothing"

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent


def build_environment(
    card: Card,
    *,
    devices: int = 1,
    ledger: Path | None = None,
    is_lone_rank: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a child process that runs on the null device.

    Args:
        card: which card each device is.
        devices: of the node.
        ledger: a folder for what each rank did (`recorder.py`, `summary.py`); nothing is written without.
        is_lone_rank: the child is one rank of many, by torchrun's variables, and the others do not run.
        base: the environment to begin with; this process's if absent.

    Raises:
        UserError: the null device cannot be built here.
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
    name = f"{card.device_name} (null device)"  # in every record that somebody makes on it
    environment[DEVICE_VARIABLE] = ";".join([name, *(f"{key}={value}" for key, value in fields.items())])
    _prepend(environment, "LD_PRELOAD", str(device.library), " ")
    _prepend(environment, "LD_LIBRARY_PATH", str(device.folder))
    _prepend(environment, "PATH", str(HERE / "bin"))
    _prepend(environment, "PYTHONPATH", f"{HERE / 'site'}{os.pathsep}{ROOT}")
    environment["TRITON_LIBCUDA_PATH"] = str(device.folder)
    # Inductor's own launcher finds the driver's functions in a way of its own; without it, it launches as Triton does.
    environment["TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER"] = "0"
    for variable, value in ((LEDGER_VARIABLE, ledger), (LONE_RANK_VARIABLE, "1" if is_lone_rank else None)):
        environment.pop(variable, None)
        if value is not None:
            environment[variable] = str(value)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def _prepend(environment: dict[str, str], variable: str, value: str, separator: str = os.pathsep) -> None:
    before = environment.get(variable)
    environment[variable] = value if not before else f"{value}{separator}{before}"
