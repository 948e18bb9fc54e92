"""Evaluation of trained models: perplexity (mainly beyond the training length), attention analyses, and generated text.

`targets` chooses what to evaluate: a text, a task, or a probe. For a text, `protocols` selects the tokens to score and
their context, `perplexity` computes their losses, and `loss_records` turns the losses into records. `megatron.reports`
builds tables and pages from records.

`generate_text` implements `./deepy.py generate`: `decoding` runs a model with its KV cache and samples tokens, and
`text_generator` streams the text. `analysis/` implements `./deepy.py analyze`.
"""
