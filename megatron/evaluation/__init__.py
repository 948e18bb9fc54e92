"""Evaluate trained models, mainly their perplexity at lengths beyond the training length.

`targets` chooses what to evaluate: a text, a task, or a probe. For a text, `protocols` selects the tokens to score and
their context, `perplexity` computes their losses, and `loss_records` turns the losses into records. `megatron.reports`
builds tables and pages from records.
"""
