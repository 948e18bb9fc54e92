"""Sweeps: train variants with several seeds, evaluate all in the same way, and write one report.

`spec.py` reads the sweep file and `validation.py` checks it. `remaining_work.py` determines which work is complete and
estimates the rest. `member_run.py` trains one member in a subprocess and evaluates it, and `run_sweep.py` runs all
members.
"""
