"""Kernels in CUDA C++: compiled at first use, launched on a GPU, and run on a CPU from the same source by tests."""
