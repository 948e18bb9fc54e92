"""Position encodings, score processors, attention temperatures, and the interfaces through which attention uses them.

    logits = processor( weight(n) · scale(i)·q_i·k_j/√d + contextual terms, bias )  →  causal mask → softmax → · v

`encoding.py`, `processor.py` and `temperature.py` define the three interfaces. `registry.py` finds the methods, which
are one file each in `encodings/`, `processors/` and `temperatures/`. This package imports torch and nothing else, so
that the folder can be shipped unchanged with an exported model.
"""
