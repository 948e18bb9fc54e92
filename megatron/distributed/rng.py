"""Random seeds, and the ranks that share them.

Seeds are derived from the configured seed, the purpose and the data index, never from the rank. Ranks that share a
layer or a sequence must draw the same numbers, and the draws should not depend on the number of ranks.

| purpose | shared by |
|---|---|
| initialization | all ranks: megatron-core draws whole weights and keeps the shard of a rank |
| dropout | ranks with the same data index, which hold the same sequences |
| positions | all ranks, different in each step: derived from the first sample that the step reads |
"""

import hashlib
from typing import Any, Literal

import torch

from megatron.distributed.core_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.distributed.mesh import Mesh

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


def seed_torch(seed: int) -> None:
    """Seed torch and, if there is a GPU, megatron-core's states for it. The groups must be initialized."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def get_cuda_rng_states() -> dict[str, Any]:
    """Return megatron-core's random states for the GPU of this process, by name."""
    return dict(get_cuda_rng_tracker().get_states())


def set_cuda_rng_states(states: dict[str, Any]) -> None:
    """Restore the states returned by `get_cuda_rng_states`."""
    get_cuda_rng_tracker().set_states(states)
