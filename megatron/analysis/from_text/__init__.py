"""Analyses of what trained models do with a text; one file each, named as they are."""
