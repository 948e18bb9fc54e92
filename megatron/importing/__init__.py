"""Models from elsewhere as run folders: `./deepy.py import`.

A source says what the model is, in our keys, and gives its weights by our names, one at a time. `run_folder.py` makes a
run of it, and nothing else in the project knows that it was not trained here.
"""
