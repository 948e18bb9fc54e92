"""Random numbers: seeds, the ranks that share them, and the states of a process's generators.

Seeds are derived from the configured seed, the purpose and the data index, never from the rank. Ranks that share a
layer or a sequence must draw the same numbers, and the draws should not depend on the number of ranks.

| purpose | shared by |
|---|---|
| initialization | all ranks: megatron-core draws whole weights and keeps the shard of a rank |
| dropout | ranks with the same data index, which process the same sequences |
| positions | all ranks, different in each step: derived from the first sample that the step reads |

States are stored as tensors and numbers, so that reading them needs no pickle.
"""

import hashlib
import json
import random
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError

SeedPurpose = Literal["initialization", "dropout"]


def derive_seed(seed: int, purpose: SeedPurpose, mesh: Mesh) -> int:
    """Return the seed of this rank for a purpose, derived from the configuration's seed.

    Dropout's seed is a hash of the configuration's seed and the data index. A sum of the two would make runs with
    seeds 1234 and 1235 share the masks of most of their ranks.
    """
    return seed if purpose == "initialization" else _hash_seed(f"dropout {seed} {mesh.data.index}")


def derive_position_seed(seed: int, sample: int) -> int:
    """Return the seed of the positions that one optimizer step draws, given the index of its first global sample.

    Positions are then those of an uninterrupted run, in any layout with the same batch size.
    """
    return _hash_seed(f"positions {seed} {sample}")


def _hash_seed(text: str) -> int:
    """Return a 32-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy, torch and, if there is a GPU, megatron-core's states for it.

    Farfield draws from torch alone; a user's own method may use any of them. The groups must be initialized.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def get_cuda_rng_states() -> dict[str, Any]:
    """Return megatron-core's random states for the GPU of this process, by name."""
    return dict(get_cuda_rng_tracker().get_states())


def set_cuda_rng_states(states: dict[str, Any]) -> None:
    """Restore the states returned by `get_cuda_rng_states`."""
    get_cuda_rng_tracker().set_states(states)


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
        states["tracker"] = get_cuda_rng_states()
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
        set_cuda_rng_states(states["tracker"])


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
