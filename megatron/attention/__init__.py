"""Attention: its inputs, the token segments of a batch, the reference implementation, and the backends.

    logits = processor( weight(n) · scale(i)·q_i·k_j/√d + contextual terms, bias )  →  causal mask → softmax → · v

`inputs.py` defines the value passed from the model to a backend. `segments.py` describes where the tokens of a batch
are in their sequences. `query_rows.py` applies the factor of a temperature to the queries. `reference.py` is the rest
of the formula in plain PyTorch, and each file in `backends/` is an implementation of it. All modules except the
backends import only torch and `megatron/position`, so that they can be shipped with exported models.
"""
