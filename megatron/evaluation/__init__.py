"""Perplexity at lengths never trained on: which tokens are scored, scoring them, and how sure the numbers are.

`targets` chooses what models are asked: a text, a task or a probe. Of a text, `protocols` decides which tokens are
scored with how much context, `perplexity` scores them, and `loss_records` makes records of the losses. What is made of
records is in `megatron.reports`.
"""
