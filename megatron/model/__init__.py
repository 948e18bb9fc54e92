"""megatron-core's GPT with our attention in its layers: building, backends, initialization, FLOPs.

`build.py` is the way in. `gpt.py` is the model, `layer.py` its transformer layer, `attention.py` the module that joins
position encoding, score processor and a backend of `backends/`.
"""
