"""Triton kernels, and C kernels for CPUs, with one folder per op.

A folder contains kernels, the operator that launches them (`op.py`), tile sizes (`configs.py`), the configurations that
`python -m megatron.kernels.compile` compiles (`aot_configs.py`), and a README with the derivation. In `bias`, each
module has the kernels and the operator of one op.
`cdape_attention` has two operators: `op.py` for GPUs, and `cpu.py` for the C code of `native/`; `args.py` describes the
arguments of both.

The package imports torch and triton; CPU-only modules do not import triton.
"""
