"""megatron-core's parallel state, which its layers want even on one CPU."""

import torch
import torch.distributed as dist

from megatron.model.megatron_core import model_parallel_cuda_manual_seed, parallel_state


def initialize(seed: int, model_parallel_size: int = 1) -> None:
    """Set up megatron-core's groups and random states; calling it again only reseeds.

    Args:
        seed: of torch's random state.
        model_parallel_size: ranks that share each layer; neighbours in rank order.

    Without a process group (evaluation, export, tests) a one-process gloo group is made in memory: no port, no files.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=model_parallel_size)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
