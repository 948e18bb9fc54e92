"""Analyses of the bias alone, for runs and untrained configurations. Each analysis has its own file."""
