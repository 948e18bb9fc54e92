"""Configurations that cover all launches, for `python -m megatron.kernels.compile bias`. H heads, W hidden units."""

from collections.abc import Iterator
from typing import Any

from megatron.kernels.bias import fire, gate_sums, toeplitz
from megatron.kernels.bias.fire import _fire_bwd_kernel, _fire_fwd_kernel
from megatron.kernels.bias.gate_sums import _gate_sums_bwd_kernel, _gate_sums_kernel
from megatron.kernels.bias.toeplitz import _toeplitz_bwd_kernel, _toeplitz_fwd_kernel
from megatron.kernels.compile import SPILL_BUDGET, KernelConfig, build_signature
from megatron.kernels.runtime import Tile

HEADS = (16, 32, fire.MAX_HEADS)
"""Head counts, padded to a power of two; smaller counts compile to the kernel for 16."""
WIDTHS = (32, fire.MAX_WIDTH)
DTYPE_NAMES = ("bf16", "fp32")
SPILL_BUDGETS = {"bf16": 64, "fp32": 256}
"""Spill budgets in bytes of FIRE's backward kernel, which keeps the sums for all heads and units in registers."""
DTYPE_POINTERS = ("out_ptr", "dout_ptr")
"""Pointers to the compute type; the others point to float32."""


def list_configurations() -> Iterator[KernelConfig]:
    """Yield every kernel in both types; FIRE's for each padded number of heads and of hidden units."""
    fwd, bwd = toeplitz.FWD_TILE, toeplitz.BWD_TILE
    for dtype_name in DTYPE_NAMES:
        yield _build_config(
            f"toeplitz_fwd {dtype_name}", _toeplitz_fwd_kernel, dtype_name, fwd, {"SATURATE": False, **fwd.blocks}
        )
        yield _build_config(
            f"toeplitz_bwd {dtype_name}", _toeplitz_bwd_kernel, dtype_name, bwd, {"factor_ptr": None, **bwd.blocks}
        )
        for heads in HEADS:
            constants = fire.build_fwd_constants(fire.FWD_TILE, heads)
            yield _build_config(
                f"fire_fwd H={heads} {dtype_name}", _fire_fwd_kernel, dtype_name, fire.FWD_TILE, constants
            )
            for width in WIDTHS:
                constants = fire.build_bwd_constants(fire.BWD_TILE, heads, width)
                name = f"fire_bwd H={heads} W={width} {dtype_name}"
                yield _build_config(name, _fire_bwd_kernel, dtype_name, fire.BWD_TILE, constants)
    for kernel, float32 in ((_gate_sums_kernel, "gates_ptr"), (_gate_sums_bwd_kernel, "dgates_ptr")):
        pointers = {x: "*fp32" if x == float32 else "*fp64" for x in kernel.arg_names if x.endswith("ptr")}
        signature = {x: pointers.get(x, "i32") for x in kernel.arg_names if x != "BLOCK"}
        name = kernel.__name__.strip("_").removesuffix("_kernel")
        yield KernelConfig(name, kernel, signature, gate_sums.CONSTANTS, gate_sums.TILE.options)
    yield _build_config("toeplitz_bwd with factor fp32", _toeplitz_bwd_kernel, "fp32", bwd, bwd.blocks)


def _build_config(name: str, kernel: Any, dtype_name: str, tile: Tile, constants: dict[str, Any]) -> KernelConfig:
    float32 = [argument for argument in kernel.arg_names if argument not in DTYPE_POINTERS]
    return KernelConfig(
        name=name,
        kernel=kernel,
        signature=build_signature(kernel, constants, dtype_name, float32),
        constexprs=constants,
        options=tile.options,
        spill_budget=SPILL_BUDGETS[dtype_name] if kernel is _fire_bwd_kernel else SPILL_BUDGET,
    )
