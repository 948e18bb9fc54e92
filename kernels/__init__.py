"""Triton kernels, each op in its folder: reference, kernels, operator, shapes, derivation. Imports torch and triton."""
