"""Random states of a process, stored as tensors and numbers so that reading them needs no pickle."""

import json
import random
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron.distributed import rng
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError

METADATA = "random"


def capture_rng_state() -> dict[str, Any]:
    """Return the states of Python, NumPy, torch, this process's GPU and megatron-core's tracker of dropout states."""
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
        states["tracker"] = rng.get_cuda_rng_states()
    return states


def restore_rng_state(states: dict[str, Any]) -> None:
    """Restore captured states. GPU states are ignored if either side has none."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
        rng.set_cuda_rng_states(states["tracker"])


def pack_rng_state(states: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return captured states as named tensors and metadata for a safetensors file."""
    version, numbers, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    tensors = {"python": numbers, "numpy": keys, "torch": states["torch"]}
    if "cuda" in states:
        tensors["cuda"] = states["cuda"]
        tensors |= {f"tracker/{name}": state for name, state in states["tracker"].items()}
    others = {"python": [version, gauss], "numpy": [kind, *rest]}  # as JSON, which preserves floats exactly
    return {f"{METADATA}/{name}": tensor for name, tensor in tensors.items()}, {METADATA: json.dumps(others)}


def unpack_rng_state(file: Any) -> dict[str, Any]:
    """Return the states in an open safetensors file.

    Raises RunError if there are none, or they are not those of `pack_rng_state`.
    """
    try:
        others = parse_json(file.metadata()[METADATA])
        names = [name for name in file.keys() if name.startswith(f"{METADATA}/")]  # noqa: SIM118
        tensors = {name.removeprefix(f"{METADATA}/"): file.get_tensor(name) for name in names}
        (version, gauss), (kind, *rest) = others["python"], others["numpy"]
        states = {
            "python": [version, tensors.pop("python"), gauss],
            "numpy": [kind, tensors.pop("numpy"), *rest],
            "torch": tensors.pop("torch"),
        }
        if "cuda" in tensors:
            states["cuda"] = tensors.pop("cuda")
            states["tracker"] = {name.removeprefix("tracker/"): state for name, state in tensors.items()}
    except (SafetensorError, ValueError, TypeError, LookupError) as error:
        raise RunError(f"not the random states of a process ({error})") from None
    return states
