"""Perplexity at lengths never trained on: which tokens are scored, scoring them, and how sure the numbers are.

`protocols` decides which tokens are scored with how much context, `perplexity` scores them with a trained model and
returns records with intervals from `bootstrap`. What is made of records is in `megatron.reports`.
"""
