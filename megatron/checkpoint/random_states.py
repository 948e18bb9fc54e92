"""All random states of a process, as tensors and numbers only, so that reading them back needs no pickle."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint import tensor_files
from megatron.errors import RunError
from megatron.parallel import seeds


def capture() -> dict[str, Any]:
    """The states of Python, NumPy, torch, this process's GPU and megatron-core's tracker of dropout states."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
        states["tracker"] = seeds.gpu_states()
    return states


def restore(states: dict[str, Any]) -> None:
    """Put captured states back. A GPU's are left out where there is none, and the other way round."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
        seeds.restore_gpu_states(states["tracker"])


def path_of(checkpoint: Path, rank: int) -> Path:
    """The file of one rank's states."""
    return checkpoint / "random_states" / f"rank_{rank:05d}.pt"


def write(checkpoint: Path, rank: int) -> Path:
    """Write this process's states; returns the file. Raises OSError if the disk refuses."""
    path = path_of(checkpoint, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(capture(), file)
    return path


def read(checkpoint: Path, rank: int) -> None:
    """Restore this process's states. Raises RunError if they are missing or damaged."""
    path = path_of(checkpoint, rank)
    states = tensor_files.read(path)
    try:
        restore(states)
    except Exception:
        raise RunError(f"{path}: does not hold the random states of a process; the checkpoint is damaged") from None
