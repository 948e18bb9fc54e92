"""Modelling code for transformers. An export gets copies of these files and of those they import, in a flat folder."""
