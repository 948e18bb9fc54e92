"""Sweeps: variants × seeds, trained and evaluated alike, with one report at the end.

`spec.py` reads the file, `validation.py` refuses what is wrong in it, `remaining_work.py` knows what is done and
estimates what is left, `member_run.py` trains one member as a process and evaluates it, and
`run_sweep.py` goes through all.
"""
