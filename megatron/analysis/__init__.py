"""What trained models attend to, and what their biases alone foretell: `./deepy.py analyze`."""
