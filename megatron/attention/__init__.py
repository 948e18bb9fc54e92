"""How attention is computed: what it is computed from, which tokens it concerns, the reference, and the backends.

    logits = processor( weight(n) · scale(i)·q_i·k_j/√d + contextual terms, bias )  →  causal mask → softmax → · v

`inputs.py` holds the one value that travels from the model to a backend, `segments.py` says where the tokens of a batch
stand in their sequences, `query_scale.py` puts the factor of a temperature on queries, `reference.py` is the rest of
the formula in plain PyTorch, and each file of `backends/` is a way to compute it. All but the backends import torch and
`megatron/position` alone, so that they travel with exported models.
"""
