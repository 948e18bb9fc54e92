"""Bias matrices for attention backends that take one: Toeplitz tables and FIRE, with deterministic gradients."""
