"""Kernels for what stands between the matrix products of a transformer layer, and for the loss."""
