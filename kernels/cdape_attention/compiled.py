"""The kernels as the shipped models launch them, for `python -m kernels.compile cdape_attention`.

H heads, D processor width, k kernel size, d head dimension.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.cdape_attention.attend import attend, attend_backward
from kernels.cdape_attention.backward import mix_backward, weight_backward
from kernels.cdape_attention.chunks import PRECISION, attend_constants
from kernels.cdape_attention.configs import attend_blocks, tiles
from kernels.cdape_attention.forward import mix
from kernels.compile import SPILL_BUDGET, SPILL_BUDGET_FLOAT32, Configuration
from kernels.rows import padded

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = [
    *((heads, 32, size) for heads in (4, 12, 16, 32) for size in (1, 3, 5, 7)),
    (12, 64, 3),
    (32, 64, 7),
]
"""H, D and k: the shipped models at the default width, and the widest."""
HEAD_DIMS = (32, 64, 80, 128)
ROWS = 256
DECODED = 1
COMPUTE_TYPE = ("scores", "score_gradient", "w1", "w2", "probabilities", "v", "output_gradient", "output")
FLOAT32 = (
    "logits",
    "gradient",
    "shares",
    "bias",
    "b2",
    "share_partial",
    "bias_partial",
    "edge_gradient",
    "partial",
    "statistics",
)
"""Pointer arguments of all kernels, by type; what is in neither is an integer."""


def _signature(kernel: Any, kind: str, constants: dict[str, Any]) -> dict[str, str]:
    types = dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(COMPUTE_TYPE, f"*{kind}")
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}


def _mixer(kernel: Any, name: str, heads: int, width: int, size: int, kind: str, rows: int) -> Configuration:
    tile = tiles(name, heads, width, size, rows, TYPES[kind])
    constants: dict[str, Any] = {
        "H": heads,
        "D": width,
        "K": size,
        "DP": padded(width),
        "BM": tile.rows,
        "BN": tile.distances,
        "SATURATE": kind == "fp16",
        "PRECISION": PRECISION,
    }
    if name == "weights":
        constants["KC"] = padded(size * heads)
    else:
        constants |= {"HP": padded(heads), "HAS_BIAS": True}
    step = " decode" if rows == DECODED else ""
    return Configuration(
        name=f"{name}{step} H={heads} D={width} k={size} {kind}",
        kernel=kernel,
        signature=_signature(kernel, kind, constants),
        constexprs=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        spill=SPILL_BUDGET_FLOAT32 if kind == "fp32" or width > 32 else SPILL_BUDGET,
    )


def _attend(kernel: Any, name: str, dim: int, kind: str, rows: int, odd: bool = False) -> Configuration:
    """`odd`: the columns of a chunk are no multiple of 16, as with a window."""
    block = attend_blocks(name, rows, TYPES[kind])
    constants = attend_constants(dim, block)
    which = " decode" if rows == DECODED else " odd" if odd else ""
    columns = "i32" if odd or rows == DECODED else "i32:16"
    return Configuration(
        name=f"{name}{which} d={dim} {kind}",
        kernel=kernel,
        signature=_signature(kernel, kind, constants) | {"COLUMNS": columns},
        constexprs=constants,
        num_warps=block.warps,
        num_stages=block.stages,
    )


def configurations() -> Iterator[Configuration]:
    """Every kernel at every shape in bfloat16, and at one shape in the other types."""
    for heads, width, size in SHAPES:
        kinds = ("bf16", "fp16", "fp32") if (heads, width, size) == (12, 32, 3) else ("bf16",)
        for kind in kinds:
            yield _mixer(mix, "forward", heads, width, size, kind, ROWS)
            yield _mixer(mix_backward, "backward", heads, width, size, kind, ROWS)
            yield _mixer(weight_backward, "weights", heads, width, size, kind, ROWS)
    for heads in (12, 32):
        yield _mixer(mix, "forward", heads, 32, 3, "bf16", DECODED)
    for dim in HEAD_DIMS:
        for kind in TYPES if dim == 64 else ("bf16",):
            yield _attend(attend, "attend", dim, kind, ROWS)
            yield _attend(attend_backward, "attend_backward", dim, kind, ROWS)
        yield _attend(attend, "attend", dim, "bf16", ROWS, odd=True)
        yield _attend(attend_backward, "attend_backward", dim, "bf16", ROWS, odd=True)
    yield _attend(attend, "attend", 64, "bf16", DECODED)
