"""Data pipeline, from text to batches: sources, tokenizers, corpora on disk, datasets, sample order, and `tasks/`."""
