"""`./deepy.py analyze`: attention patterns of trained models, and predictions from their biases alone."""
