"""Memory that PyTorch's allocators request from the driver."""

import torch

from megatron.checkpoint.sharded_state import PinnedStagingBuffers
from megatron.distributed.process_groups import configure_cuda


def test_the_host_copy_of_a_checkpoint_takes_its_own_size() -> None:
    """PyTorch would pin the next power of two, up to twice the memory."""
    configure_cuda()
    state = torch.empty((1 << 25) + 1, device="cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    buffers = PinnedStagingBuffers()
    (copy,) = buffers.copy_to_host({"master": state}).values()
    assert copy.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before == 4 * copy.numel()
