"""Analyses of what trained models do with a text, or with the task that they learned; one file each."""
