"""Configurations that the shipped models launch, for `python -m megatron.kernels.compile cdape_attention`.

H heads, D processor width, k kernel size, d head dimension.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.kernels.cdape_attention import gate_terms
from megatron.kernels.cdape_attention.attention_kernel import ATTENTION_KERNELS
from megatron.kernels.cdape_attention.backward import _processor_bwd_dw_kernel, _processor_bwd_kernel
from megatron.kernels.cdape_attention.configs import (
    build_attend_constants,
    build_heads_constants,
    build_processor_constants,
    build_product_constants,
    build_qkv_constants,
    choose_attend_tile,
    choose_heads_tile,
    choose_processor_tile,
    choose_product_tile,
)
from megatron.kernels.cdape_attention.forward import _processor_fwd_kernel
from megatron.kernels.cdape_attention.gate_kernels import (
    _gate_gradients_kernel,
    _gate_operands_kernel,
    _gate_weights_kernel,
)
from megatron.kernels.cdape_attention.geometry import KernelForm, choose_kernel
from megatron.kernels.cdape_attention.mapped_softmax import (
    _differentiate_mapped_kernel,
    _map_weights_kernel,
    build_mapped_constants,
    build_mapped_gradient_constants,
    choose_mapped_tile,
)
from megatron.kernels.cdape_attention.mixer_chunks import BACKWARD_KERNELS
from megatron.kernels.cdape_attention.products import _differentiate_qkv_kernel, _multiply_kernel
from megatron.kernels.cdape_attention.scores import _scores_kernel
from megatron.kernels.cdape_attention.softmax import _attend_bwd_kernel, _attend_fwd_kernel, _attend_sums_kernel
from megatron.kernels.compile import SPILL_BUDGET, SPILL_BUDGET_FLOAT32, KernelConfig, PassKernel, build_signature

DTYPES_BY_NAME = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = [
    *((heads, 32, kernel_size) for heads in (4, 12, 16, 32) for kernel_size in (1, 3, 5, 7)),
    (12, 64, 3),
    (32, 64, 7),
]
"""H, D and k of the shipped models at the default width, and of the widest."""
HEAD_DIMS = (32, 64, 80, 96, 128)
ROWS = 256
DECODE_ROWS = 1
SPILL_BUDGETS = {
    (False, False): SPILL_BUDGET,
    (False, True): 24,
    (True, False): 80,
    (True, True): 104,
}
"""Spill budgets in bytes, by whether a processor has more than three taps and whether rows are packed documents.

Only mix_bwd on sm_80 spills: up to four registers (19 with four heads and seven taps), and with documents a row of
contributions. It keeps this row for the next whole tile while it processes other tiles. Loading it again would read
8 KB more per tile.
"""
PROCESSOR_KERNELS = {
    "mix_fwd": _processor_fwd_kernel,
    "mix_bwd": _processor_bwd_kernel,
    "mix_bwd_dw": _processor_bwd_dw_kernel,
}
"""Processor kernels, by the names used in docs/results."""
ATTEND_KERNELS = {"attend_fwd": _attend_fwd_kernel, "attend_sums": _attend_sums_kernel}
HEAD_TILE_KERNELS = {"scores": _scores_kernel, "attend_bwd": _attend_bwd_kernel}
"""Kernels whose programs process a tile of all heads."""
PRODUCT_KERNELS = {"differentiate_qkv": _differentiate_qkv_kernel, "multiply": _multiply_kernel}
MAPPED_KERNELS = {"map_weights": _map_weights_kernel, "differentiate_mapped": _differentiate_mapped_kernel}
"""Kernels of a softmax with a map between the heads."""
FLOAT32_POINTERS = (
    *("sinks_ptr", "head_map_ptr", "dmap_ptr"),
    *("logits_ptr", "bias_contributions_ptr", "bias_ptr", "b2_ptr", "stats_ptr", "sums_ptr"),
    *("dbias_contributions_ptr", "dbias_ptr", "dedge_ptr", "dw_ptr"),
)


def _add_document_starts(constants: dict[str, Any], documents: bool) -> dict[str, Any]:
    """Set the pointer to document starts to None if rows are single documents."""
    return constants if documents else constants | {"document_starts_ptr": None}


def _build_processor_config(
    name: str,
    heads: int,
    width: int,
    kernel_size: int,
    dtype_name: str,
    rows: int,
    documents: bool = False,
    linear: bool = False,
) -> KernelConfig:
    kernel, dtype = PROCESSOR_KERNELS[name], DTYPES_BY_NAME[dtype_name]
    tile = choose_processor_tile(name, heads, width, kernel_size, rows, dtype)
    sizes = (heads, width, kernel_size)
    constants = build_processor_constants(name, *sizes, dtype, tile, has_bias=True, is_linear=linear)
    constants = _add_document_starts(constants, documents)
    step = " decode" if rows == DECODE_ROWS else " documents" if documents else " linear" if linear else ""
    return KernelConfig(
        name=f"{name}{step} H={heads} D={width} k={kernel_size} {dtype_name}",
        kernel=kernel,
        signature=build_signature(kernel, constants, dtype_name, FLOAT32_POINTERS),
        constexprs=constants,
        options=tile.options,
        spill_budget=SPILL_BUDGET_FLOAT32
        if dtype_name == "fp32" or width > 32
        else SPILL_BUDGETS[kernel_size > 3, documents],
    )


def _build_attend_config(
    name: str,
    dim: int,
    dtype_name: str,
    rows: int,
    odd: bool = False,
    documents: bool = False,
    sinks: bool = False,
    residue: bool = False,
) -> KernelConfig:
    """Build the configuration of an attend kernel. `odd`: the columns are not a multiple of 16, as with a window."""
    kernel: Any = ATTEND_KERNELS[name]
    tile = choose_attend_tile(name, rows, DTYPES_BY_NAME[dtype_name])
    constants = _add_document_starts(build_attend_constants(dim, tile, 12), documents)
    if name == "attend_fwd" and not sinks:
        constants = constants | {"sinks_ptr": None}
    if name == "attend_fwd" and not residue:
        constants = constants | {"residue_ptr": None}
    suffix = " decode" if rows == DECODE_ROWS else " odd" if odd else " documents" if documents else ""
    suffix += " sinks" if sinks else " residue" if residue else ""
    aligned = () if odd or rows == DECODE_ROWS else ("C",)
    return KernelConfig(
        name=f"{name}{suffix} d={dim} {dtype_name}",
        kernel=kernel,
        signature=build_signature(kernel, constants, dtype_name, FLOAT32_POINTERS, aligned),
        constexprs=constants,
        options=tile.options,
    )


def _build_head_tile_config(
    name: str, heads: int, dim: int, dtype_name: str, rows: int, odd: bool = False, documents: bool = False
) -> KernelConfig:
    """Build the configuration of a kernel over all heads; `odd` as in `_build_attend_config`."""
    kernel: Any = HEAD_TILE_KERNELS[name]
    dtype, aligned = DTYPES_BY_NAME[dtype_name], rows != DECODE_ROWS and not odd
    known = aligned or name == "scores"
    tile = choose_heads_tile(rows, dtype)
    constants = _add_document_starts(build_heads_constants(heads, dim, tile, dtype, known), documents)
    suffix = " decode" if rows == DECODE_ROWS else " odd" if odd else " documents" if documents else ""
    return KernelConfig(
        name=f"{name}{suffix} H={heads} d={dim} {dtype_name}",
        kernel=kernel,
        signature=build_signature(kernel, constants, dtype_name, FLOAT32_POINTERS, ("C",) if aligned else ()),
        constexprs=constants,
        options=tile.options,
        spill_budget=SPILL_BUDGET_FLOAT32 if dtype_name == "fp32" else SPILL_BUDGET,
    )


def _build_product_config(
    name: str, dim: int, dtype_name: str, *, odd: bool = False, documents: bool = False, add: bool = False
) -> KernelConfig:
    """Build the configuration of products; `add`: results are added to other chunks' sums in float32.

    The partial sums are those that the CUDA kernels leave: of tables, of weights, and of E.
    """
    kernel: Any = PRODUCT_KERNELS[name]
    tile = choose_product_tile(dim, DTYPES_BY_NAME[dtype_name])
    suffix = " odd" if odd else " documents" if documents else " add" if add else ""
    of_types = dtype_name, ("dk_ptr", "dv_ptr") if add else (), () if odd else ("C",)
    if name == "multiply":
        constants = _add_document_starts(build_product_constants(dim, tile), documents)
        signature = build_signature(kernel, constants, *of_types)
    else:
        constants = build_qkv_constants(dim, tile, add=add)
        constants = _add_document_starts(constants, documents)
        signature = build_signature(kernel, (*constants, "partial_sums"), *of_types)
        signature["partial_sums"] = (("*fp32", "*fp32", "i32", "i32", *("i32:16",) * 4),) * 3
    return KernelConfig(
        name=f"{name}{suffix} d={dim} {dtype_name}",
        kernel=kernel,
        signature=signature,
        constexprs=constants,
        options=tile.options,
    )


def _build_mapped_config(
    name: str, heads: int, dtype_name: str, *, documents: bool = False, sinks: bool = False, pairs: bool = True
) -> KernelConfig:
    """Build the configuration of a softmax with a map between the heads; `pairs`: dL is for the CUDA kernels."""
    kernel: Any = MAPPED_KERNELS[name]
    is_backward = name == "differentiate_mapped"
    tile = choose_mapped_tile(heads, DTYPES_BY_NAME[dtype_name], is_backward=is_backward)
    if is_backward:
        constants = build_mapped_gradient_constants(heads, tile, in_pairs=pairs)
    else:
        constants = build_mapped_constants(heads, tile)
        constants = constants if sinks else constants | {"sinks_ptr": None}
    constants = _add_document_starts(constants, documents)
    suffix = " documents" * documents + " sinks" * sinks + " last" * (not pairs)
    return KernelConfig(
        name=f"{name}{suffix} H={heads} {dtype_name}",
        kernel=kernel,
        signature=build_signature(kernel, constants, dtype_name, FLOAT32_POINTERS, ("C",)),
        constexprs=constants,
        options=tile.options,
        spill_budget=SPILL_BUDGET_FLOAT32 if dtype_name == "fp32" else SPILL_BUDGET,
    )


GATE_POINTERS = {
    **dict.fromkeys(("row_ptr", "key_ptr", "drow_ptr", "dkey_ptr", "partial_ptr"), "*fp64"),
    **dict.fromkeys(("rows_ptr", "columns_ptr", "edge_ptr", "bias_ptr"), "*fp32"),
    **dict.fromkeys(("drows_ptr", "dcolumns_ptr", "dedge_ptr", "weights_ptr"), "*fp32"),
    **dict.fromkeys(("document_starts_ptr", "index_ptr"), "*i32"),
    "exchanged_ptr": "*fp16",
}
"""Types of the pointers of kernels for gates; weights have the compute type."""
GATE_SPILL_BUDGETS = {("gate_gradients", 3): 8, ("gate_operands", 1): 8}
"""Spill budgets with documents, in bytes: outside of products, the first on sm_80, the second on sm_90."""


def _build_gate_config(name: str, kernel_size: int = 3, *, documents: bool = False) -> KernelConfig:
    """Build the configuration of a kernel for a bias of gates; without documents, chunks get existing fragments."""
    kernel, constants, tile = {
        "gate_operands": (
            _gate_operands_kernel,
            gate_terms.build_operand_constants(kernel_size, is_residual=True),
            gate_terms.TERMS_TILE,
        ),
        "gate_gradients": (
            _gate_gradients_kernel,
            gate_terms.build_gradient_constants(kernel_size, is_residual=True),
            gate_terms.TERMS_TILE,
        ),
        "gate_weights": (_gate_weights_kernel, gate_terms.WEIGHTS_CONSTANTS, gate_terms.WEIGHTS_TILE),
    }[name]
    names = kernel.arg_names
    if name != "gate_weights":
        constants = _add_document_starts(constants, documents)
    if name == "gate_operands" and not documents:
        constants = constants | dict.fromkeys(("w2_ptr", "index_ptr", "exchanged_ptr", "plain_ptr"))
    signature = {x: GATE_POINTERS.get(x, "*bf16" if x.endswith("ptr") else "i32") for x in names if x not in constants}
    suffix = " documents" if documents else ""
    budget = GATE_SPILL_BUDGETS.get((name, kernel_size), SPILL_BUDGET) if documents else SPILL_BUDGET
    return KernelConfig(
        f"{name}{suffix} k={kernel_size}", kernel, signature, constants, tile.options, spill_budget=budget
    )


def list_configurations() -> Iterator[KernelConfig]:
    """Yield every kernel at every shape in bfloat16, at one shape in the other types, and at some with documents."""
    for heads, width, kernel_size in SHAPES:
        dtype_names = ("bf16", "fp16", "fp32") if (heads, width, kernel_size) == (12, 32, 3) else ("bf16",)
        for dtype_name in dtype_names:
            for name in PROCESSOR_KERNELS:
                yield _build_processor_config(name, heads, width, kernel_size, dtype_name, ROWS)
    for heads in (12, 32):
        yield _build_processor_config("mix_fwd", heads, 32, 3, "bf16", DECODE_ROWS)
    for dim in HEAD_DIMS:
        for dtype_name in DTYPES_BY_NAME if dim == 64 else ("bf16",):
            for name in ATTEND_KERNELS:
                yield _build_attend_config(name, dim, dtype_name, ROWS)
        for name in ATTEND_KERNELS:
            yield _build_attend_config(name, dim, "bf16", ROWS, odd=True)
    for heads, dim in ((4, 32), (12, 64), (16, 64), (32, 80), (16, 96), (16, 128), (32, 128)):
        for dtype_name in DTYPES_BY_NAME if (heads, dim) == (12, 64) else ("bf16",):
            for name in HEAD_TILE_KERNELS:
                yield _build_head_tile_config(name, heads, dim, dtype_name, ROWS)
    for heads, kernel_size in ((12, 3), (16, 3), (32, 3), (12, 7)):
        for name in PROCESSOR_KERNELS:
            yield _build_processor_config(name, heads, 32, kernel_size, "bf16", ROWS, documents=True)
    for dim in (64, 80):
        for name in ATTEND_KERNELS:
            yield _build_attend_config(name, dim, "bf16", ROWS, documents=True)
        yield _build_attend_config("attend_fwd", dim, "bf16", ROWS, sinks=True)
    yield _build_attend_config("attend_fwd", 64, "bf16", ROWS, residue=True)
    for heads, dim in ((12, 64), (16, 64), (32, 80)):
        for name in HEAD_TILE_KERNELS:
            yield _build_head_tile_config(name, heads, dim, "bf16", ROWS, documents=True)
    for dim in HEAD_DIMS:
        for dtype_name in DTYPES_BY_NAME if dim == 64 else ("bf16",):
            for name in PRODUCT_KERNELS:
                yield _build_product_config(name, dim, dtype_name)
    for name in PRODUCT_KERNELS:
        yield _build_product_config(name, 64, "bf16", odd=True)
        yield _build_product_config(name, 64, "bf16", documents=True)
        if name != "multiply":
            yield _build_product_config(name, 64, "bf16", add=True)
    for heads in (4, 8, 32):
        for name in PROCESSOR_KERNELS:
            yield _build_processor_config(name, heads, heads, 1, "bf16", ROWS, linear=True)
    for name in MAPPED_KERNELS:
        for heads in (4, 12, 16, 32):
            for dtype_name in DTYPES_BY_NAME if heads == 16 else ("bf16",):
                yield _build_mapped_config(name, heads, dtype_name, pairs=heads <= 16)
        yield _build_mapped_config(name, 16, "bf16", documents=True, sinks=name == "map_weights")
    for name in ("gate_operands", "gate_gradients"):
        for kernel_size in (1, 3, 5, 7):
            for documents in (False, True):
                yield _build_gate_config(name, kernel_size, documents=documents)
    yield _build_gate_config("gate_weights")
    yield _build_attend_config("attend_fwd", 64, "bf16", DECODE_ROWS)
    yield _build_head_tile_config("scores", 12, 64, "bf16", DECODE_ROWS)
    yield _build_head_tile_config("attend_bwd", 12, 64, "bf16", ROWS, odd=True)


def list_passes(arch: int) -> dict[str, list[PassKernel]]:
    """Return the kernels of a forward and backward pass with heads of 64, width 32 and k = 3, in bfloat16.

    They are Triton's, with 12 heads, and those that are launched if blocks fill the GPU: CUDA kernels, and Triton's for
    the products, with 12 and 16 heads. Triton's tiles are the same for each architecture.
    """
    launched = {f"CDAPE in CUDA, {heads} heads": list(_build_launched_pass(heads, arch)) for heads in (12, 16)}
    return {"CDAPE": list(_build_triton_pass(12)), **launched}


def _build_launched_pass(heads: int, arch: int) -> Iterator[PassKernel]:
    triton_kernels = {kernel.config.name.split()[0]: kernel for kernel in _build_triton_pass(heads)}
    form = KernelForm(3, 64, torch.bfloat16)  # heads are padded
    for family in (ATTENTION_KERNELS, *BACKWARD_KERNELS):
        kernel = choose_kernel(family, form, arch)
        assert kernel is not None
        yield PassKernel(kernel.code, kernel.tile.rows * kernel.tile.columns, has_loop=True)
    yield triton_kernels["differentiate_qkv"]


def _build_triton_pass(heads: int) -> Iterator[PassKernel]:
    """Yield Triton's kernels of a forward and backward pass."""
    width, kernel_size, dim, dtype_name = 32, 3, 64, "bf16"
    dw_tile = choose_processor_tile("mix_bwd_dw", heads, width, kernel_size, ROWS, DTYPES_BY_NAME[dtype_name])
    head_tile = choose_heads_tile(ROWS, DTYPES_BY_NAME[dtype_name])
    tiles = {
        name: choose_processor_tile(name, heads, width, kernel_size, ROWS, DTYPES_BY_NAME[dtype_name])
        for name in ("mix_fwd", "mix_bwd")
    }
    kept_pixels = {name: tile.block_m * (tile.block_n - 2 * (kernel_size // 2)) for name, tile in tiles.items()}
    yield PassKernel(
        _build_head_tile_config("scores", heads, dim, dtype_name, ROWS),
        head_tile.block_m * head_tile.block_n,
        has_loop=False,
        launches=2,
    )
    yield PassKernel(
        _build_processor_config("mix_fwd", heads, width, kernel_size, dtype_name, ROWS),
        kept_pixels["mix_fwd"],
        has_loop=False,
        launches=2,
    )
    for name in ATTEND_KERNELS:
        tile = choose_attend_tile(name, ROWS, DTYPES_BY_NAME[dtype_name])
        yield PassKernel(
            _build_attend_config(name, dim, dtype_name, ROWS), tile.block_m * tile.block_n / heads, has_loop=True
        )
    yield PassKernel(
        _build_head_tile_config("attend_bwd", heads, dim, dtype_name, ROWS),
        head_tile.block_m * head_tile.block_n,
        has_loop=False,
    )
    yield PassKernel(
        _build_processor_config("mix_bwd_dw", heads, width, kernel_size, dtype_name, ROWS),
        dw_tile.block_m * dw_tile.block_n,
        has_loop=True,
    )
    yield PassKernel(
        _build_processor_config("mix_bwd", heads, width, kernel_size, dtype_name, ROWS),
        kept_pixels["mix_bwd"],
        has_loop=True,
    )
    product = choose_product_tile(dim, DTYPES_BY_NAME[dtype_name])
    yield PassKernel(
        _build_product_config("differentiate_qkv", dim, dtype_name),
        product.block_m * product.block_n / heads,
        has_loop=True,
        loops=3,  # dQ, dK and dV
    )
