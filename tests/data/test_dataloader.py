from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.torch_data import DistributedBatchSampler, build_dataloader
from megatron.distributed.mesh import Axis, Mesh, ParallelSizes
from megatron.utils.errors import RunError


class Numbers(torch.utils.data.Dataset):
    """Dataset whose sample i is filled with i; sample `broken` cannot be read."""

    def __init__(self, samples, broken=None):
        self.samples, self.broken = samples, broken

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index == self.broken:
            raise RunError(f"corpus: sample {index} is broken")
        return {"tokens": torch.full((3,), index), "loss_mask": torch.ones(3)}


@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 4), st.integers(0, 50))
@settings(deadline=None)
def test_all_ranks_together_read_each_sample_once_in_order(samples, micro_batch, world, start):
    order = {"micro_batch_size": micro_batch, "start": start}
    ranks = [list(DistributedBatchSampler(samples, data=Axis(rank, world), **order)) for rank in range(world)]
    steps = [list(chain(*step)) for step in zip(*ranks, strict=True)]
    usable = max(0, samples - start) // (micro_batch * world) * micro_batch * world
    assert list(chain(*steps)) == list(range(start, start + usable))


@given(
    st.sampled_from([(1, 4, 3), (2, 2, 3), (4, 1, 3), (2, 6, 1), (12, 1, 1), (1, 12, 1), (3, 1, 4)]), st.integers(0, 5)
)
@settings(deadline=None)
def test_a_step_reads_the_same_samples_for_any_ranks_and_wherever_it_resumes(shape, done):
    world, micro_batch, accumulate = shape  # 12 samples per optimizer step
    read = [[] for _ in range(6 - done)]
    for rank in range(world):
        order = DistributedBatchSampler(72, micro_batch_size=micro_batch, data=Axis(rank, world), start=12 * done)
        for i, indices in enumerate(order):
            read[i // accumulate] += indices
    assert [sorted(step) for step in read] == [list(range(12 * s, 12 * s + 12)) for s in range(done, 6)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_stacked_samples(num_workers):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = list(
        build_dataloader(
            Numbers(23), micro_batch_size=2, mesh=Mesh(1, ParallelSizes(data=2)), start=3, num_workers=num_workers
        )
    )
    assert [batch["tokens"][:, 0].tolist() for batch in found] == [[5, 6], [9, 10], [13, 14], [17, 18], [21, 22]]
    assert found[0]["tokens"].dtype == torch.int64
    assert found[0]["loss_mask"].shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), before)  # loading batches does not affect dropout


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_any_process_are_one_line(num_workers):
    found = build_dataloader(Numbers(9, broken=4), micro_batch_size=2, mesh=Mesh(), num_workers=num_workers)
    assert next(found)["tokens"][:, 0].tolist() == [0, 1]
    next(found)
    with pytest.raises(RunError, match=r"^corpus: sample 4 is broken$"):
        next(found)


def test_impossible_orders_are_rejected():
    for wrong in ({"micro_batch_size": 0}, {"start": -1}):
        with pytest.raises(ValueError, match="micro_batch_size"):
            DistributedBatchSampler(5, **({"micro_batch_size": 1, "data": Axis(0, 2), "start": 0} | wrong))
