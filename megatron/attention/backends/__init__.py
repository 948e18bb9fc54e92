"""Ways to compute attention, all equal to `eager` (`pytorch.py`) up to rounding.

Each file holds what implements `AttentionBackend`. `registry.py` selects one when the model is built, so that a
combination of encoding and processor that a backend cannot do is refused then, by name. What only shows in a call, and
`triton` leaves to PyTorch, is said once.
"""
