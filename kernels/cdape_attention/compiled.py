"""The kernels as the shipped models launch them, for `python -m kernels.compile cdape_attention`.

H heads, D processor width, k kernel size.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.cdape_attention.backward import mix_backward, weight_backward
from kernels.cdape_attention.chunks import COLUMN_BLOCK
from kernels.cdape_attention.configs import padded, tiles
from kernels.cdape_attention.forward import mix
from kernels.cdape_attention.softmax import softmax, softmax_backward
from kernels.compile import Configuration

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = [
    *((heads, 32, size) for heads in (4, 12, 16, 32) for size in (1, 3, 5, 7)),
    (12, 64, 3),
    (32, 64, 7),
]
"""H, D and k: the shipped models at the default width, and the widest."""
ROWS = 256
DECODED = 1
COMPUTE_TYPE = ("scores", "score_gradient", "w1", "w2")
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
)
"""Pointer arguments of the mixer kernels, by type."""


def _signature(kernel: Any, constants: dict[str, Any], pointers: dict[str, str]) -> dict[str, str]:
    return {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}


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
        "PRECISION": "ieee",
    }
    if name == "weights":
        constants["KC"] = padded(size * heads)
    else:
        constants |= {"HP": padded(heads), "HAS_BIAS": True}
    pointers = dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(COMPUTE_TYPE, f"*{kind}")
    step = " decode" if rows == DECODED else ""
    return Configuration(
        name=f"{name}{step} H={heads} D={width} k={size} {kind}",
        kernel=kernel,
        signature=_signature(kernel, constants, pointers),
        constexprs=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    for kind in TYPES:
        pointers = {"probabilities": f"*{kind}", "products": f"*{kind}", "logits": "*fp32", "statistics": "*fp32"}
        constants = {"BLOCK": COLUMN_BLOCK}
        for kernel, name in ((softmax, "softmax"), (softmax_backward, "softmax_backward")):
            yield Configuration(
                name=f"{name} {kind}",
                kernel=kernel,
                signature=_signature(kernel, constants, pointers),
                constexprs=constants,
            )
