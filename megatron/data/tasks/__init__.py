"""Tasks to train models on from scratch, with evaluation at lengths beyond training."""
