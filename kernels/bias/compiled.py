"""The configurations that the shipped models launch, for `python -m kernels.compile bias`. H heads."""

from collections.abc import Iterator
from typing import Any

from kernels.bias import configs
from kernels.bias.fire import fire_gradient_kernel, fire_kernel
from kernels.bias.toeplitz import diagonal_sum_kernel, spread_kernel
from kernels.compile import SPILL_BUDGET, SPILL_BUDGET_FLOAT32, Configuration
from kernels.rows import padded

HEADS = (4, 16, 32)
"""12 heads compile to what 16 do."""
TYPES = ("bf16", "fp32")
FLOAT_ARGUMENTS = ("above", "largest")


def configurations() -> Iterator[Configuration]:
    """Every kernel in both types; FIRE's for each padded number of heads, width 32."""
    for text in TYPES:
        high, wide = configs.SPREAD
        yield _one(f"toeplitz {text}", spread_kernel, {"OUT": text}, {"LIMITED": False, "BM": high, "BN": wide})
        high, wide = configs.DIAGONAL
        sizes = {"BM": high, "BN": wide}
        yield _one(f"diagonals {text}", diagonal_sum_kernel, {"GRAD": text}, {"FACTOR": None, **sizes})
        for heads in sorted({padded(heads) for heads in HEADS}):
            fixed = {"BLOCK": configs.FIRE_BLOCK, "HP": heads}
            yield _one(f"fire H={heads} {text}", fire_kernel, {"OUT": text}, fixed)
            fixed = {"BLOCK": configs.FIRE_GRADIENT_BLOCK, "HP": heads, "WP": 32}
            yield _one(f"fire gradient H={heads} {text}", fire_gradient_kernel, {"GRAD": text}, fixed)
    high, wide = configs.DIAGONAL
    yield _one("diagonals with factor fp32", diagonal_sum_kernel, {"GRAD": "fp32"}, {"BM": high, "BN": wide})


def _one(name: str, kernel: Any, types: dict[str, str], constexprs: dict[str, Any]) -> Configuration:
    """Arguments in capitals are pointers, float32 unless `types` says otherwise, but for the sizes H, R, C, N and W."""
    signature = {}
    for argument in kernel.arg_names:
        if argument in constexprs:
            continue
        if argument in FLOAT_ARGUMENTS:
            signature[argument] = "fp32"
        elif argument.isupper() and argument not in ("H", "R", "C", "N", "W"):
            signature[argument] = f"*{types.get(argument, 'fp32')}"
        else:
            signature[argument] = "i32"
    return Configuration(
        name,
        kernel,
        signature,
        constexprs,
        num_warps=configs.NUM_WARPS,
        num_stages=configs.NUM_STAGES,
        spill=SPILL_BUDGET_FLOAT32 if kernel is fire_gradient_kernel else SPILL_BUDGET,
    )
