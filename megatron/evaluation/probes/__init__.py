"""Probes: what a model makes of text that is made up, and needs no corpus. One file each, listed in `targets.py`."""
