"""Bias matrices for attention that takes one: Toeplitz tables and FIRE, with deterministic gradients."""
