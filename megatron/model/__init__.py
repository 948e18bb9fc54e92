"""megatron-core's GPT with our attention in its layers: model building, backend choice, initialization, FLOPs.

`build.py` is the entry point. `gpt.py` is the model, `layer.py` its transformer layer, and `attention.py` the module
that combines position encoding, score processor and a backend of `megatron/attention/backends`.
"""
