"""Triton kernels, and C kernels for CPUs, with one folder per op.

A folder holds its kernels and the operators around them in `op.py`; in `bias`, one module per op has both.
`configs.py` has the tile sizes, and `aot_configs.py` the configurations that `python -m megatron.kernels.compile`
compiles. A README has the derivation.
`cdape_attention` has two operators: `op.py` for GPUs, and `cpu.py` for the C code of `native/`; `args.py` describes the
arguments of both.

The package imports torch and triton; CPU-only modules do not import triton.
"""
