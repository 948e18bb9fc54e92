"""Utilities for all other packages: errors, files, signals and formatting."""
