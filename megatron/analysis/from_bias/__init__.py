"""Analyses of a bias alone, of runs and of configurations that were not trained; one file each, named as they are."""
