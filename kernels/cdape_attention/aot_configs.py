"""The kernels as the shipped models launch them, for `python -m kernels.compile cdape_attention`.

H heads, D processor width, k kernel size, d head dimension.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.cdape_attention.backward import _mix_bwd_dw_kernel, _mix_bwd_kernel
from kernels.cdape_attention.configs import (
    attend_constants,
    attend_tile,
    heads_constants,
    heads_tile,
    mixer_constants,
    mixer_tile,
)
from kernels.cdape_attention.forward import _mix_fwd_kernel
from kernels.cdape_attention.scores import _scores_kernel
from kernels.cdape_attention.softmax import _attend_bwd_kernel, _attend_fwd_kernel, _attend_sums_kernel
from kernels.compile import SPILL_BUDGET, SPILL_BUDGET_FLOAT32, KernelConfig, build_signature
from kernels.instructions import PassKernel

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
MIXER = {"mix_fwd": _mix_fwd_kernel, "mix_bwd": _mix_bwd_kernel, "mix_bwd_dw": _mix_bwd_dw_kernel}
ATTEND = {"attend_fwd": _attend_fwd_kernel, "attend_sums": _attend_sums_kernel}
ALL_HEADS = {"scores": _scores_kernel, "attend_bwd": _attend_bwd_kernel}
FLOAT32 = (
    *("logits_ptr", "shares_ptr", "bias_ptr", "b2_ptr", "stats_ptr", "sums_ptr"),
    *("dshares_ptr", "dbias_ptr", "dedge_ptr", "dw_ptr"),
)


def _mixer_configuration(name: str, heads: int, width: int, size: int, kind: str, rows: int) -> KernelConfig:
    kernel, dtype = MIXER[name], TYPES[kind]
    tile = mixer_tile(name, heads, width, size, rows, dtype)
    constants = mixer_constants(name, heads, width, size, dtype, tile, has_bias=True)
    step = " decode" if rows == DECODED else ""
    return KernelConfig(
        name=f"{name}{step} H={heads} D={width} k={size} {kind}",
        kernel=kernel,
        signature=build_signature(kernel, constants, kind, FLOAT32),
        constexprs=constants,
        options=tile.options,
        spill_budget=SPILL_BUDGET_FLOAT32 if kind == "fp32" or width > 32 else SPILL_BUDGET,
    )


def _softmax_configuration(name: str, dim: int, kind: str, rows: int, odd: bool = False) -> KernelConfig:
    """`odd`: the columns of a chunk are no multiple of 16, as with a window."""
    kernel: Any = ATTEND[name]
    tile = attend_tile(name, rows, TYPES[kind])
    constants = attend_constants(dim, tile)
    which = " decode" if rows == DECODED else " odd" if odd else ""
    aligned = () if odd or rows == DECODED else ("C",)
    return KernelConfig(
        name=f"{name}{which} d={dim} {kind}",
        kernel=kernel,
        signature=build_signature(kernel, constants, kind, FLOAT32, aligned),
        constexprs=constants,
        options=tile.options,
    )


def _heads_configuration(name: str, heads: int, dim: int, kind: str, rows: int, odd: bool = False) -> KernelConfig:
    """`odd` as above."""
    kernel: Any = ALL_HEADS[name]
    tile = heads_tile(rows, dim, TYPES[kind])
    constants = heads_constants(heads, dim, tile)
    return KernelConfig(
        name=f"{name}{' decode' if rows == DECODED else ' odd' if odd else ''} H={heads} d={dim} {kind}",
        kernel=kernel,
        signature=build_signature(kernel, constants, kind, FLOAT32, () if odd or rows == DECODED else ("C",)),
        constexprs=constants,
        options=tile.options,
        spill_budget=SPILL_BUDGET_FLOAT32 if kind == "fp32" else SPILL_BUDGET,
    )


def list_configurations() -> Iterator[KernelConfig]:
    """Every kernel at every shape in bfloat16, and at one shape in the other types."""
    for heads, width, size in SHAPES:
        kinds = ("bf16", "fp16", "fp32") if (heads, width, size) == (12, 32, 3) else ("bf16",)
        for kind in kinds:
            for name in MIXER:
                yield _mixer_configuration(name, heads, width, size, kind, ROWS)
    for heads in (12, 32):
        yield _mixer_configuration("mix_fwd", heads, 32, 3, "bf16", DECODED)
    for dim in HEAD_DIMS:
        for kind in TYPES if dim == 64 else ("bf16",):
            for name in ATTEND:
                yield _softmax_configuration(name, dim, kind, ROWS)
        for name in ATTEND:
            yield _softmax_configuration(name, dim, "bf16", ROWS, odd=True)
    for heads, dim in ((4, 32), (12, 64), (16, 64), (32, 80), (16, 128)):
        for kind in TYPES if (heads, dim) == (12, 64) else ("bf16",):
            for name in ALL_HEADS:
                yield _heads_configuration(name, heads, dim, kind, ROWS)
    yield _softmax_configuration("attend_fwd", 64, "bf16", DECODED)
    yield _heads_configuration("scores", 12, 64, "bf16", DECODED)
    yield _heads_configuration("attend_bwd", 12, 64, "bf16", ROWS, odd=True)


def list_passes(arch: int) -> dict[str, list[PassKernel]]:
    """The kernels of a forward and backward pass with 12 heads of 64, width 32 and k = 3, in bfloat16.

    Their tiles are the same for each architecture.
    """
    return {"CDAPE": list(_build_pass())}


def _build_pass() -> Iterator[PassKernel]:
    heads, width, size, dim, kind = 12, 32, 3, 64, "bf16"
    every = mixer_tile("mix_bwd_dw", heads, width, size, ROWS, TYPES[kind])
    of_heads = heads_tile(ROWS, dim, TYPES[kind])
    tiles = {name: mixer_tile(name, heads, width, size, ROWS, TYPES[kind]) for name in ("mix_fwd", "mix_bwd")}
    kept = {name: tile.block_m * (tile.block_n - 2 * (size // 2)) for name, tile in tiles.items()}
    yield PassKernel(
        _heads_configuration("scores", heads, dim, kind, ROWS),
        of_heads.block_m * of_heads.block_n,
        has_loop=False,
        launches=2,
    )
    yield PassKernel(
        _mixer_configuration("mix_fwd", heads, width, size, kind, ROWS), kept["mix_fwd"], has_loop=False, launches=2
    )
    for name in ATTEND:
        tile = attend_tile(name, ROWS, TYPES[kind])
        yield PassKernel(
            _softmax_configuration(name, dim, kind, ROWS), tile.block_m * tile.block_n / heads, has_loop=True
        )
    yield PassKernel(
        _heads_configuration("attend_bwd", heads, dim, kind, ROWS), of_heads.block_m * of_heads.block_n, has_loop=False
    )
    yield PassKernel(
        _mixer_configuration("mix_bwd_dw", heads, width, size, kind, ROWS), every.block_m * every.block_n, has_loop=True
    )
    yield PassKernel(_mixer_configuration("mix_bwd", heads, width, size, kind, ROWS), kept["mix_bwd"], has_loop=True)
