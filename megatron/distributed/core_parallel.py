"""Single import point of megatron-core's process groups and random states, without PyTorch's compiler."""

from megatron.utils.imports import trim_imports

with trim_imports():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = ["get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "parallel_state"]
