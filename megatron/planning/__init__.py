"""Memory and time that a run needs, estimated from a configuration and a mesh without importing torch.

`model_costs.py` counts parameters and FLOPs. `activations.py` and `attention_memory.py` count the tensors that a layer
and each attention backend save for the backward pass, `row_block_memory.py` those of PyTorch's row blocks.
`memory_estimate.py` combines them for one rank, including ZeRO and pipelines. Each encoding and processor declares its
own costs in its file. The formulas model our code, PyTorch and DeepSpeed; tests compare them with the real ones.
"""
