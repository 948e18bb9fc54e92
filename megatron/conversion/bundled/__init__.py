"""Modeling code for transformers. An export contains flat copies of these files and of the files they import."""
