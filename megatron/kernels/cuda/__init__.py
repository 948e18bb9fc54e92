"""Kernels in CUDA C++: compiled at first use and launched on a GPU; tests run the same source on a CPU."""
