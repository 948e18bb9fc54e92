"""Random numbers: seeds depend on the purpose and the data index, and states are saved and restored without pickle."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from megatron.checkpoint import tensor_files
from megatron.distributed import rng
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import build_single_process_groups
from megatron.utils.errors import RunError


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
    rng.seed_generators(5)
    ours = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(ours, torch.rand(3))


def test_seeding_repeats_draws_of_python_and_numpy_too() -> None:
    """A user's own method may draw from any of them, and runs with one seed must be equal."""
    build_single_process_groups()
    rng.seed_generators(5)
    first = draw()
    rng.seed_generators(5)
    assert draw() == first


def draw() -> tuple[object, ...]:
    numpy = np.random.rand(), np.random.randn()
    return random.random(), random.gauss(0, 1), *numpy, torch.rand(1).item(), torch.randn(3).tolist()


def test_captured_results_are_returned(tmp_path: Path) -> None:
    draw()  # an odd number of Gaussians leaves a cached value in the generators
    tensor_files.write_tensors(tmp_path / "states", *rng.pack_rng_state(rng.capture_rng_state()))
    expected = draw()
    assert draw() != expected
    with safe_open(tmp_path / "states", "pt") as file:
        rng.restore_rng_state(rng.unpack_rng_state(file))
    assert draw() == expected


def test_random_states_of_a_gpu_are_saved(tmp_path: Path) -> None:
    gpu = {"cuda": torch.arange(16, dtype=torch.uint8), "tracker": {"model-parallel-rng": torch.ones(4)}}
    tensor_files.write_tensors(tmp_path / "states", *rng.pack_rng_state(rng.capture_rng_state() | gpu))
    with safe_open(tmp_path / "states", "pt") as file:
        found = rng.unpack_rng_state(file)
    assert torch.equal(found["cuda"], gpu["cuda"])
    assert torch.equal(found["tracker"]["model-parallel-rng"], torch.ones(4))


@pytest.mark.parametrize("metadata", [{}, {"random": "{}"}, {"random": "no"}])
def test_a_file_without_random_states_is_rejected(tmp_path: Path, metadata: dict[str, str]) -> None:
    tensor_files.write_tensors(tmp_path / "states", {"random/torch": torch.get_rng_state()}, metadata)
    with (
        safe_open(tmp_path / "states", "pt") as file,
        pytest.raises(RunError, match="not the random states of a process"),
    ):
        rng.unpack_rng_state(file)
