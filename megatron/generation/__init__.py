"""Text generation with a trained model.

`sampling` chooses tokens, `decoding` runs the model with its KV cache, `text_generator` combines both for one model and
streams the text, and `generate_text` implements `./deepy.py generate`.
"""
