"""From text to batches: sources and tokenizers, corpora on disk, datasets, and the order in which samples are read."""
