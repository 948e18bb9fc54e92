"""Triton kernels, and C for CPUs, each op in its folder: reference, kernels, operator, shapes, derivation.

Imports torch and triton; what runs on a CPU alone imports no triton.
"""
