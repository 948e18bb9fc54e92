"""Position encodings, score processors, and the contract by which attention uses them.

    logits = processor( weight(n) · q_i·k_j/√d + contextual terms, bias )  →  causal mask → softmax → · v

`encoding.py` and `processor.py` define the two interfaces, `scores.py` is the formula above in executable form,
`registry.py` finds the methods: one file each in `encodings/` and `processors/`. Everything here imports torch and
nothing else, so that the folder can travel with an exported model as it is.
"""
