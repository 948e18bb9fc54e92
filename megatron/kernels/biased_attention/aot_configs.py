"""Configurations that the shipped models launch, for `python -m megatron.kernels.compile biased_attention`.

H heads, d head dimension. The compiled code depends on the head dimension and the type, not on H, which is a runtime
argument. The shapes are (12, 64), (16, 64), (32, 80) and (4, 32), with 128 as the maximum head dimension.
"""

from collections.abc import Iterator

import torch

from megatron.kernels.biased_attention import configs
from megatron.kernels.biased_attention.backward_dkdv import _bwd_dkdv_kernel
from megatron.kernels.biased_attention.backward_dq import _bwd_dq_kernel
from megatron.kernels.biased_attention.forward import AllHeadRows, AttentionSizes, _fwd_kernel
from megatron.kernels.biased_attention.tables import Tables
from megatron.kernels.compile import SPILL_BUDGET_FLOAT32, KernelConfig, PassKernel, build_signature

HEAD_DIMS = (32, 64, 80, 96, 128)
DTYPES_BY_NAME = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = {"plain": ("bias_ptr", "weight_ptr"), "bias": ("weight_ptr",), "bias+weight": ()}
"""Absent table pointers, by the name of the combination of tables."""
STRIDE = 3 * 12 * 64
"""Row stride of q, k and v if they are computed as one matrix with 12 heads of 64, in elements."""
SPILL_BUDGETS = {
    ("fwd", False): 40,
    ("fwd", True): 176,
    ("bwd_dq", False): 136,
    ("bwd_dq", True): 560,
    ("bwd_dkdv", False): 32,
    ("bwd_dkdv", True): 144,
}
"""Spill budgets for half types, in bytes, by kernel and whether the head dimension exceeds 64.

Most spills are around the loops over tiles, not inside them. Tiles without spills need 1.5 times the instructions.
"""
FLOAT32_POINTERS = ("bias_ptr", "weight_ptr", "lse_ptr", "delta_ptr", "dkey_bias_ptr", "sinks_ptr")
TUPLES = {
    **dict.fromkeys(("q", "k", "v", "do", "o"), AllHeadRows),
    **dict.fromkeys(("tables", "dtables"), Tables),
    "sizes": AttentionSizes,
}


def list_configurations() -> Iterator[KernelConfig]:
    """Yield the configurations to compile.

    These are bias in all types, with a window, with documents and with sinks; in bf16 also plain and bias + weight,
    which use the same tiles; key bias in bf16 and float32, and in bf16 also together with a bias table.
    """
    for dim in HEAD_DIMS:
        for dtype_name in DTYPES_BY_NAME:
            yield from _list_kernels("bias", dim, dtype_name)
        yield from _list_kernels("bias", dim, "bf16", windowed=True)
        yield from _list_kernels("bias", dim, "bf16", documents=True)
        yield from _list_kernels("bias", dim, "bf16", sinks=True)
        yield from _list_kernels("plain", dim, "bf16")
        yield from _list_kernels("bias+weight", dim, "bf16")
        yield from _list_kernels("plain", dim, "bf16", keys=True)
        yield from _list_kernels("plain", dim, "fp32", keys=True)
        yield from _list_kernels("bias", dim, "bf16", keys=True)


def _list_kernels(
    tables: str,
    dim: int,
    dtype_name: str,
    *,
    windowed: bool = False,
    documents: bool = False,
    keys: bool = False,
    sinks: bool = False,
) -> Iterator[KernelConfig]:
    names = {" window": windowed, " documents": documents, " keys": keys, " sinks": sinks}
    of_rows = next((name for name, is_there in names.items() if is_there), "")
    for arch in (80, 90):
        tiles = configs.choose_tiles(arch, DTYPES_BY_NAME[dtype_name], dim)
        for kernel_name, kernel, tile in (
            ("fwd", _fwd_kernel, tiles.fwd),
            ("bwd_dq", _bwd_dq_kernel, tiles.bwd_dq),
            ("bwd_dkdv", _bwd_dkdv_kernel, tiles.bwd_dkdv),
        ):
            strides = () if kernel is _fwd_kernel else (STRIDE,) * 4
            constants = dict(configs.build_tile_constants(tile, dim, strides, windowed=windowed))
            if "dlse_ptr" in kernel.arg_names:
                constants["dlse_ptr"] = None  # the logsumexp has no gradient
            if not documents:
                constants["document_starts_ptr"] = None
            if not keys:
                constants |= {name: None for name in ("key_bias_ptr", "dkey_bias_ptr") if name in kernel.arg_names}
            if kernel is _fwd_kernel and not sinks:
                constants["sinks_ptr"] = None
            elif sinks and kernel is not _fwd_kernel:  # they do not depend on sinks
                continue
            yield KernelConfig(
                name=f"{kernel_name} {tables}{of_rows} d={dim} {dtype_name}",
                kernel=kernel,
                signature=build_signature(
                    kernel, constants, dtype_name, FLOAT32_POINTERS, tuples=TUPLES, absent=TABLES[tables]
                ),
                constexprs=constants,
                options=tile.options,
                arches=(arch,),
                spill_budget=SPILL_BUDGET_FLOAT32 if dtype_name == "fp32" else SPILL_BUDGETS[kernel_name, dim > 64],
            )


def list_passes(arch: int) -> dict[str, list[PassKernel]]:
    """Return the kernels of both passes in bfloat16, with and without a learned bias, by head dimension.

    A score is a pair of a row and a column with all heads: 12 of 64, 32 of 80 or 16 of 128.
    """
    return {
        f"{name}, {heads} heads of {dim}": list(_build_pass(tables, heads, dim, arch))
        for heads, dim in ((12, 64), (32, 80), (16, 128))
        for name, tables in (("learned bias", "bias"), ("no bias", "plain"))
    }


def _build_pass(tables: str, heads: int, dim: int, arch: int) -> Iterator[PassKernel]:
    for configuration in _list_kernels(tables, dim, "bf16"):
        if configuration.arches == (arch,):
            tile = configuration.constexprs["BLOCK_M"] * configuration.constexprs["BLOCK_N"]
            yield PassKernel(configuration, tile / heads, has_loop=True)
