"""Triton kernels, and C for CPUs, each op in its folder.

A folder holds its kernels, the operators around them (`op.py`; in `bias` one module has both, for each of two ops),
`reference.py` in plain PyTorch, which tests compare with, `configs.py` with tile sizes, `aot_configs.py` with what
`python -m kernels.compile` compiles, and a README with the derivation. `cdape_attention` has two operators, `op.py` for
GPUs and `cpu.py` over the C code of `native/`; `args.py` says what calls of both are like.

Imports torch and triton; what runs on a CPU alone imports no triton.
"""
