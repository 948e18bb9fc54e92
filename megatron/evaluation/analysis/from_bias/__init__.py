"""Analyses of the bias alone, for runs and untrained configurations. Each analysis has a file of its name."""
