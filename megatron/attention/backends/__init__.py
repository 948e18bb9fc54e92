"""Attention backends, all equal to `eager` (`pytorch.py`) up to rounding.

Each file contains an implementation of `AttentionBackend`. `registry.py` selects one when the model is built, so that
unsupported combinations of encoding and processor raise an error by name at that time. Some conditions are only known
at a call. `triton` then falls back to PyTorch with a single warning.
"""
