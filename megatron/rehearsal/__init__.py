"""Rehearsals: run the real training process without a GPU, on a CUDA device that records calls and computes nothing.

`null_device/` is the device; the modules of this package run a job's ranks on it and compare their behavior.
"""
