"""A CUDA device that allocates, copies and refuses as a card does, and computes nothing.

A child process that `environment.py` describes finds the library of `native/` (built by `build.py`) in the places of
the CUDA runtime, the driver, cuBLAS, cuDNN and NCCL. PyTorch, Triton and DeepSpeed run on it unchanged: memory comes
from their own allocators, kernels are compiled and loaded, launches and allocations that a card would refuse fail.
What is read back from the device has no meaning; `host_reads.py` says what stands in for it, and nothing else does.

Nothing here can be active in a real run: only a child process that was given this environment loads any of it.
"""
