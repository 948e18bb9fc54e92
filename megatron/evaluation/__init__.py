"""Perplexity at lengths never trained on: protocols, records, and what is made of records (tables, plots, reports).

`protocols` decides which tokens are scored with how much context, `perplexity` scores them with a trained model and
returns `records`, and everything after that (`tables`, `plots`, `report`) reads records and never sees a model.
"""
