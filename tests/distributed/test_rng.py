"""Seeds depend on the purpose and the data index, never on the rank."""

import torch

from megatron.distributed import rng
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import build_single_process_groups


def test_only_ranks_of_one_data_index_draw_equal_samples() -> None:
    sizes = ParallelSizes(tensor=2, context=2, data=3, pipeline=2)
    meshes = [Mesh(rank, sizes) for rank in range(sizes.world_size)]
    assert {rng.derive_seed(7, "initialization", mesh) for mesh in meshes} == {7}
    by_index = {(mesh.data.index, rng.derive_seed(7, "dropout", mesh)) for mesh in meshes}
    assert len(by_index) == len({seed for _, seed in by_index}) == sizes.data


def test_consecutive_seeds_share_no_dropout_mask_on_any_rank() -> None:
    sizes = ParallelSizes(data=8)
    seeds = [rng.derive_seed(seed, "dropout", Mesh(rank, sizes)) for seed in range(1234, 1250) for rank in range(8)]
    assert len(set(seeds)) == len(seeds)


def test_seeding_matches_torch() -> None:
    build_single_process_groups()
    rng.seed_torch(5)
    ours = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(ours, torch.rand(3))
