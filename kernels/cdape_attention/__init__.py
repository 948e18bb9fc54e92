"""CDAPE attention in memory linear in the length: see README.md for the derivation and `op.py` for the interface."""
