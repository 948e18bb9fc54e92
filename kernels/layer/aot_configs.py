"""The configurations of which all launches are one, for `python -m kernels.compile layer`."""

from collections.abc import Iterator
from typing import Any

from kernels.compile import KernelConfig, build_signature
from kernels.layer import configs
from kernels.layer.activation import ACTIVATIONS, _activation_bwd_kernel, _activation_fwd_kernel
from kernels.layer.heads import Heads, _copy_heads_kernel
from kernels.layer.loss import _loss_bwd_kernel, _loss_fwd_kernel
from kernels.layer.norm import _add_norm_bwd_kernel, _add_norm_fwd_kernel
from kernels.layer.sums import _sum_partials_kernel
from kernels.runtime import Tile

WIDTHS = (768, 1024, 4096, 8192)
HEAD_DIMS = (64, 80, 128)
DTYPE_NAMES = ("bf16", "fp32")
FLOAT32 = ("partial_ptr", "cos_ptr", "sin_ptr", "log_z_ptr", "picked_ptr", "dloss_ptr", "dlog_z_ptr")


def list_configurations() -> Iterator[KernelConfig]:
    """Every kernel in both types, at the widths of the shipped models."""
    for dtype in DTYPE_NAMES:
        yield _build(f"sum_partials {dtype}", _sum_partials_kernel, dtype, configs.SUM)
        for width in WIDTHS:
            yield from _list_norms(width, dtype)
        yield from _list_activations(dtype)
        for dim in HEAD_DIMS:
            yield from _list_copies(dim, dtype)
        tile = configs.choose_loss_tile(50304)
        for name, kernel in (("fwd", _loss_fwd_kernel), ("bwd", _loss_bwd_kernel)):
            for capped in (False, True):
                constants = {"CAPPED": capped, **({} if kernel is _loss_fwd_kernel else {"dlog_z_ptr": None})}
                yield _build(f"loss_{name}{' cap' if capped else ''} {dtype}", kernel, dtype, tile, **constants)


def _list_norms(width: int, dtype: str) -> Iterator[KernelConfig]:
    tile = configs.choose_norm_tile(width)
    yield _build(f"add_norm_fwd C={width} {dtype}", _add_norm_fwd_kernel, dtype, tile, CENTERS=True)
    sums = {"SHIFTS": True, "ADDS_BIAS": True, "dbranch_ptr": None}
    yield _build(f"add_norm_bwd C={width} {dtype}", _add_norm_bwd_kernel, dtype, tile, CENTERS=True, **sums)
    absent = {"bias_ptr": None, "residual_ptr": None, "total_ptr": None, "shift_ptr": None}
    yield _build(f"rms_fwd C={width} {dtype}", _add_norm_fwd_kernel, dtype, tile, CENTERS=False, **absent)
    sums = {"SHIFTS": False, "ADDS_BIAS": False}
    yield _build(f"rms_bwd C={width} {dtype}", _add_norm_bwd_kernel, dtype, tile, CENTERS=False, **sums)


def _list_activations(dtype: str) -> Iterator[KernelConfig]:
    tile = configs.choose_activation_tile(4096)
    for activation in ACTIVATIONS:
        for gated in (False, True):
            values = {"ACTIVATION": activation, "GATED": gated}
            name = f"{'gated ' if gated else ''}{activation} {dtype}"
            yield _build(f"fwd {name}", _activation_fwd_kernel, dtype, tile, **values)
            yield _build(f"bwd {name}", _activation_bwd_kernel, dtype, tile, **values)


def _list_copies(dim: int, dtype: str) -> Iterator[KernelConfig]:
    tile = configs.choose_head_tile(dim)
    for rotated in (0, dim):
        values: dict[str, Any] = {"QUERIES": 1, "SLOTS": 3, "SIGN": -1, "D": dim, "R": rotated}
        if not rotated:
            values |= {"cos_ptr": None, "sin_ptr": None}
        yield _build(f"copy_heads d={dim} r={rotated} {dtype}", _copy_heads_kernel, dtype, tile, **values)


def _build(name: str, kernel: Any, dtype: str, tile: Tile, **values: Any) -> KernelConfig:
    constants = {**values, **tile.blocks}
    tuples = dict.fromkeys(("q", "k", "v", "q_out", "k_out", "v_out"), Heads)
    signature = build_signature(kernel, constants, dtype, FLOAT32, ("C", "V"), tuples=tuples)
    return KernelConfig(
        name=name, kernel=kernel, signature=signature, constexprs=constants, options=tile.options, spill_budget=0
    )
