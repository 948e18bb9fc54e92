"""Analyses of trained models that read a text or sequences of their task. Each analysis has its own file."""
