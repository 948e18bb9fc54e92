"""The configurations of which all launches are one, for `python -m kernels.compile bias`. H heads, W hidden units."""

from collections.abc import Iterator
from typing import Any

from kernels.bias import configs
from kernels.bias.fire import _fire_bwd_kernel, _fire_fwd_kernel
from kernels.bias.toeplitz import _toeplitz_bwd_kernel, _toeplitz_fwd_kernel
from kernels.compile import KernelConfig, build_signature
from kernels.runtime import Tile

HEADS = (16, 32, configs.MAX_HEADS)
"""Filled up to a power of two; fewer compile to what 16 do."""
WIDTHS = (32, configs.MAX_WIDTH)
TYPES = ("bf16", "fp32")
TYPED = ("out_ptr", "dout_ptr")
"""Pointers to the compute type; the others are to float32."""


def list_configurations() -> Iterator[KernelConfig]:
    """Every kernel in both types; FIRE's for each padded number of heads and of hidden units."""
    fwd, bwd = configs.TOEPLITZ_FWD, configs.TOEPLITZ_BWD
    for kind in TYPES:
        yield _configuration(f"toeplitz_fwd {kind}", _toeplitz_fwd_kernel, kind, fwd, {"SATURATE": False, **fwd.blocks})
        yield _configuration(
            f"toeplitz_bwd {kind}", _toeplitz_bwd_kernel, kind, bwd, {"factor_ptr": None, **bwd.blocks}
        )
        for heads in HEADS:
            constants = configs.fire_fwd_constants(configs.FIRE_FWD, heads)
            yield _configuration(f"fire_fwd H={heads} {kind}", _fire_fwd_kernel, kind, configs.FIRE_FWD, constants)
            for width in WIDTHS:
                constants = configs.fire_bwd_constants(configs.FIRE_BWD, heads, width)
                name = f"fire_bwd H={heads} W={width} {kind}"
                yield _configuration(name, _fire_bwd_kernel, kind, configs.FIRE_BWD, constants)
    yield _configuration("toeplitz_bwd with factor fp32", _toeplitz_bwd_kernel, "fp32", bwd, bwd.blocks)


def _configuration(name: str, kernel: Any, kind: str, tile: Tile, constants: dict[str, Any]) -> KernelConfig:
    float32 = [argument for argument in kernel.arg_names if argument not in TYPED]
    return KernelConfig(
        name=name,
        kernel=kernel,
        signature=build_signature(kernel, constants, kind, float32),
        constexprs=constants,
        options=tile.options,
    )
