"""What a run will need, by arithmetic alone: from a configuration and the sizes of a mesh, without torch or a GPU.

`model_costs.py` counts parameters and FLOPs, `activations.py` what a layer keeps for the backward pass,
`attention_memory.py` what each attention backend keeps, and
`memory_estimate.py` puts them together for one rank, with what ZeRO and pipelines make of them. What an encoding or a
processor adds is declared in its own file. The formulas are a model of what our code, PyTorch and DeepSpeed do; tests
compare them with what these keep.
"""
