"""Text from a trained model: how the next token is chosen, decoding with the model's cache, and text in a stream.

`sampling` chooses tokens, `decode` runs the model, `stream` turns tokens into text that can be shown at once, `writer`
puts the three together for one model, and `run` is `./deepy.py generate`.
"""
