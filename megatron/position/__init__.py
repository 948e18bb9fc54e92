"""Position encodings, score processors, attention temperatures, and the contract by which attention uses them.

    logits = processor( weight(n) · scale(i)·q_i·k_j/√d + contextual terms, bias )  →  causal mask → softmax → · v

`encoding.py`, `processor.py` and `temperature.py` define the three interfaces, and `registry.py` finds the methods:
one file each in `encodings/`, `processors/` and `temperatures/`. Everything here imports torch and
nothing else, so that the folder can travel with an exported model as it is.
"""
