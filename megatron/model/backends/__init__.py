"""Ways to compute attention, all equal to `eager` up to rounding.

Each file holds one `Backend`. `choose.py` picks one when the model is built, so that a combination that a backend
cannot do is refused then, by name, and never dropped while running.
"""
