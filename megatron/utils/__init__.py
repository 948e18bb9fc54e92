"""Utilities for all other packages: errors, files, signals, the console and formatting."""
