"""The configurations that the shipped models launch, for `python -m kernels.compile biased_attention`.

H heads, d head dimension. What is compiled depends on the head dimension and the type, not on H, which is a runtime
argument; the shapes are (12, 64), (16, 64), (32, 80) and (4, 32), with 128 as the largest head dimension.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.biased_attention import configs
from kernels.biased_attention.backward import column_kernel, row_kernel
from kernels.biased_attention.forward import forward_kernel
from kernels.compile import SPILL_BUDGET, SPILL_BUDGET_FLOAT32, Configuration
from kernels.rows import split_head_dim

HEAD_DIMS = (32, 64, 80, 128)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = {"plain": (False, False), "bias": (True, False), "bias+weight": (True, True)}
STRIDES = ("b", "h", "r")


def configurations() -> Iterator[Configuration]:
    """bias in all types and with a window; plain and bias + weight, which share the tiles, in bf16."""
    for dim in HEAD_DIMS:
        for text in TYPES:
            yield from _kernels("bias", dim, text, windowed=False)
        yield from _kernels("bias", dim, "bf16", windowed=True)
        yield from _kernels("plain", dim, "bf16", windowed=False)
        yield from _kernels("bias+weight", dim, "bf16", windowed=False)


def _kernels(tables: str, dim: int, text: str, *, windowed: bool) -> Iterator[Configuration]:
    for arch in (80, 90):
        config = configs.config(arch, TYPES[text], dim)
        kernels = {"forward": config.forward, "rows": config.rows, "columns": config.columns}
        for which, tiles in kernels.items():
            kernel = {"forward": forward_kernel, "rows": row_kernel, "columns": column_kernel}[which]
            constexprs = _constexprs(kernel, tiles, dim, text, tables, windowed)
            yield Configuration(
                name=f"{which} {tables}{' window' if windowed else ''} d={dim} {text}",
                kernel=kernel,
                signature=_signature(kernel, text, constexprs),
                constexprs=constexprs,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                arches=(arch,),
                spill=SPILL_BUDGET_FLOAT32 if text == "fp32" else SPILL_BUDGET,
            )


def _constexprs(kernel: Any, tiles: configs.Tiles, dim: int, text: str, tables: str, windowed: bool) -> dict[str, Any]:
    has_bias, has_weight = TABLES[tables]
    first, second = split_head_dim(dim)
    known: dict[str, Any] = {
        "WINDOWED": windowed,
        "BM": tiles.BM,
        "BN": tiles.BN,
        "BLOCK": tiles.BM,
        "DA": first,
        "DB": second,
        "DIM": dim,
        "PRECISION": "ieee" if text == "fp32" else "tf32",
        "DLSE": None,
    }
    known |= {} if has_bias else {"BIAS": None, "DBIAS": None}
    known |= {} if has_weight else {"WEIGHT": None, "DWEIGHT": None}
    return {name: known[name] for name in kernel.arg_names if name in known}


def _signature(kernel: Any, text: str, constexprs: dict[str, Any]) -> dict[str, str]:
    single = ("BIAS", "WEIGHT", "LSE", "DELTA", "DBIAS", "DWEIGHT")
    signature = {}
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        if name.startswith("stride_"):
            signature[name] = "i32:16"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in ("H", "R", "C", "N", "offset", "window"):
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in single else f"*{text}"
    return signature
