"""Experiments: variants × seeds, trained and scored alike, with one report at the end.

`spec` reads the file, `check` refuses what is wrong in it, `estimate` says what is to be done, `supervision` runs a
training as a process, `receipts` know what is done already, and `run` goes through all of it.
"""
