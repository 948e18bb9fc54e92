"""Attention temperatures: one per file, with one `Temperature` subclass.

The name of the file is the temperature's name.
"""
