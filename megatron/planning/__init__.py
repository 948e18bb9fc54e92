"""What a run will need, by arithmetic alone: from a configuration and the sizes of a mesh, without torch or a GPU.

`positions.py` says what encodings and processors add, `parameters.py` counts weights, `activations.py` what a forward
pass keeps for the backward pass, and `memory.py` puts them together for one rank, with what ZeRO and pipelines make of
them. The formulas are a model of what our code, PyTorch and DeepSpeed do; tests compare them with what these keep.
"""
