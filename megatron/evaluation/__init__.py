"""Perplexity at lengths never trained on: which tokens are scored, scoring them, and how sure the numbers are.

`subjects` settles what models are asked. Of a text, `protocols` decides which tokens are scored with how much context,
`perplexity` scores them, and `measures` makes records of the losses. What is made of records is in `megatron.reports`.
"""
