"""Probes: evaluations on synthetic text, which need no corpus. `targets.py` lists them."""
