"""A training rehearsed without a GPU: the real run, rank by rank, on a null CUDA device."""
