"""Text from a trained model: how the next token is chosen, decoding with the model's cache, and text in a stream.

`sampling` chooses tokens, `decoding` runs the model, `text_generator` puts the two together for one model and turns
tokens into text that can be shown at once, and `generate_text` is `./deepy.py generate`.
"""
