"""Null device: a CUDA device that allocates, copies and raises errors like a real GPU, but computes nothing.

A child process with the environment of `environment.py` loads the library of `native/` (built by the same module)
instead of the CUDA runtime, the driver, cuBLAS, cuDNN and NCCL. PyTorch, Triton and DeepSpeed run on it unchanged.
Their own allocators manage the memory, kernels are compiled and loaded, and launches and allocations that a real GPU
would reject fail. Values read back from the device are meaningless; `host_reads.py` alone defines the values that
replace them.

A real run can never activate this package: only a child process with this environment loads it.
"""
