"""CDAPE attention in memory linear in the length: README.md has the derivation, `op.py` the interface."""
