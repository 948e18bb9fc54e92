"""GPU jobs without a GPU: the real training process on a CUDA device that keeps books and computes nothing.

`null_device/` is that device; what is here runs a job's ranks on it and compares what they did.
"""
