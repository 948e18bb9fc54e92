"""Backward pass of the score processor by CUDA kernels (`cuda/mixer_backward.h`), and inputs of all CUDA kernels.

B batch, H heads, R query rows of a chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. The kernels pad H to 16 and D to a multiple of 32.
"""

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.gate_terms import GateInputs, GateOperands
from megatron.kernels.cdape_attention.geometry import (
    ELEMENTS,
    HEADS,
    SIZE_LIMITS,
    WIDTH,
    KernelFamily,
    KernelForm,
    MixerKernel,
    SizeLimit,
    Tile,
    count_diagonal_bytes,
    count_pair_window_bytes,
    count_run_bytes,
)
from megatron.kernels.cdape_attention.mixer_operands import (
    BLOCK_ROWS,
    MAX_TILE_COLUMNS,
    Fragments,
    MixerOperands,
    find_pointer,
)
from megatron.kernels.cdape_attention.weights import WeightShape
from megatron.kernels.cuda.compile import CudaKernel, load_nvrtc
from megatron.kernels.head_dim import MAX_HEAD_DIM
from megatron.kernels.jit_build import CompileError
from megatron.kernels.runtime import cdiv

VARIABLE = "FARFIELD_CUDA_MIXER"
"""Environment variable. If it is 0, Triton's kernels are used instead of all CUDA kernels."""
TILES = (Tile(32, 32), Tile(16, 64), Tile(16, 32))


def _count_weights_bytes(tile: Tile, form: KernelForm) -> int:
    return 2 * count_pair_window_bytes(tile)


def _count_scores_bytes(tile: Tile, form: KernelForm) -> int:
    results = count_run_bytes(tile, form, by_rows=False), count_diagonal_bytes(tile, form)
    shares_memory = form.kernel_size <= 3 and form.width <= WIDTH
    return 2 * count_pair_window_bytes(tile) + (max(results) if shares_memory else sum(results))


SCORE_GRADIENT_KERNELS = KernelFamily(
    *("mixer_backward.h", "MixerBackward<{}, true, false>", "MixerBackwardArgs"),
    TILES,
    _count_scores_bytes,
    SIZE_LIMITS,
)
WEIGHT_GRADIENT_KERNELS = KernelFamily(
    *("mixer_backward.h", "MixerBackward<{}, false, true>", "MixerBackwardArgs"),
    TILES,
    _count_weights_bytes,
    SIZE_LIMITS,
)


Launch = Callable[[CudaKernel, tuple[int, int], ctypes.Structure], None]
"""Function that runs a kernel on a grid of (blocks, sequences)."""


class ScoreInputs(ctypes.Structure):
    """Inputs of scores, as declared in `cuda/scores.h` and `cuda/spans.h`."""

    _fields_ = (
        *(("document_starts", ctypes.c_void_p), ("starts_batch", ctypes.c_longlong)),
        *((name, ctypes.c_int) for name in ("rows", "columns", "position", "window", "origin", "edge_position")),
        *((name, ctypes.c_void_p) for name in ("q", "k")),
        *((name, ctypes.c_int) for name in ("q_stride", "k_stride", "q_row", "heads")),
    )


class MixerBackwardArgs(ctypes.Structure):
    """Arguments of both kernels, as declared in `cuda/mixer_backward_inputs.h`."""

    _fields_ = (
        ("scores", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("dlogits", "table", "edge", "w1", "w2", "w1_back")),
        *((name, ctypes.c_void_p) for name in ("dscores", "dtables", "dedge", "dweights")),
        *((name, ctypes.c_int) for name in ("table_group", "dtable_rows")),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "map_batch", "edge_batch", "dscores_batch")),
        ("gates", GateInputs),
        ("drows", ctypes.c_void_p),
        ("drows_batch", ctypes.c_longlong),
    )


class ColumnSpans(NamedTuple):
    """Columns that a chunk's rows see, if a window or documents hide some columns from position 0 on."""

    window: int
    left: int
    """Position of the maps' first column."""
    document_starts: Tensor | None
    """int32 [B, R], contiguous: positions at which the rows' documents begin; None if all are 0."""


class ChunkInputs(NamedTuple):
    """Inputs of a chunk's logits, which the kernels of both passes read."""

    queries: Tensor
    """Scaled queries [B, H, R, d]: rows of a tensor whose last two dimensions are contiguous."""
    keys: Tensor
    """Keys [B, H, C or more, d] with contiguous last dimensions; C is the position after the chunk's last row."""
    operands: MixerOperands | None
    """Operands without a bias of gates, or None."""
    layer: int
    """Index of the layer in the operands."""
    first_row: int
    """Row of E for the chunk's first row; 0 with documents."""
    position: int
    """Column of the chunk's first row; its position if the maps begin at position 0."""
    spans: ColumnSpans | None = None
    gates: GateOperands | None = None
    """Operands with a bias of gates, or None."""


class RowGradients(NamedTuple):
    """Gradients of a chunk's rows with gates, in float32, to which the kernels write."""

    sums: Tensor
    """Gradients of hidden values and logits by row, [B, R, 48] (`gate_terms.GateSums`)."""
    edge: Tensor
    """Gradient of E, [B, R, 4p, 32], initially 0."""


class MixerGradients(NamedTuple):
    """Gradients of a chunk in float32, one partial sum per program of the kernels."""

    tables: Tensor
    """Gradients of U from distance −p on and of the bias, [programs, n, padded D + 16], see `unpack_tables`.

    With gates, these are gradients of hidden values from column p on and of logits, by column.
    """
    edge: Tensor
    """Gradient of E, [B, R, p, padded D]; with gates that of `RowGradients`."""
    weights: Tensor
    """Gradients of both weights, [programs, 1, 2 · k · 16 · padded D], see `unpack_weights`."""


def is_enabled() -> bool:
    """Return True unless the environment disables these kernels."""
    return os.environ.get(VARIABLE) != "0"


@cache
def has_compiler() -> bool:
    """Return True if NVRTC can be loaded; otherwise warn once."""
    try:
        load_nvrtc()
    except CompileError as failure:
        warnings.warn(f"CDAPE's CUDA kernels are unavailable, using Triton's: {failure}", stacklevel=2)
        return False
    return True


def is_supported(
    shape: WeightShape,
    dtype: torch.dtype,
    dim: int,
    columns: int,
    limits: tuple[SizeLimit, ...] = SIZE_LIMITS,
) -> bool:
    """Return True if some GPU has kernels for these shapes, and the processor is within one of `limits`.

    Kernels support half precision and head dimensions that are multiples of 16. Fewer heads or widths are padded. With
    up to 8 heads and a width of up to 16 or above 32, Triton's kernels need no more instructions (README.md).

    Args:
        limits: limits of a `KernelFamily`.
    """
    return (
        dtype in ELEMENTS
        and dim % 16 == 0
        and dim <= MAX_HEAD_DIM
        and any(limit.covers(shape.kernel_size, shape.heads, shape.width) for limit in limits)
        and (shape.heads > HEADS // 2 or WIDTH // 2 < shape.width <= WIDTH)
        and columns % 8 == 0
    )


def build_score_inputs(
    queries: Tensor, keys: Tensor, columns: int, position: int, spans: ColumnSpans | None = None
) -> ScoreInputs:
    """Describe a chunk's queries [B, H, R, d] and keys [B, H, C or more, d] for a kernel.

    The last dimension of queries and the last two dimensions of keys are contiguous.
    """
    heads, rows = queries.shape[1:3]
    strides = (size * queries.element_size() for size in (queries.stride(1), keys.stride(1), queries.stride(2)))
    own: tuple[int, ...] = (0, 0, 0)
    documents: tuple[int | None, int] = (None, 0)
    if spans is not None:
        own = (spans.window, spans.left, position + spans.left if spans.document_starts is None else 0)
        if spans.document_starts is not None:
            documents = (spans.document_starts.data_ptr(), spans.document_starts.stride(0) * 4)
    tensors = (queries.data_ptr(), keys.data_ptr())
    return ScoreInputs(*documents, rows, columns, position, *own, *tensors, *strides, heads)


class SharedTables:
    """Tables of partial sums that are reused by calls of the same shape, such as the layers of a pass.

    The kernel writes the same entries in each of these calls, and all others stay zero. The tables are therefore filled
    with zeros once instead of once per call. A call's sums must be read before the next call.
    """

    def __init__(self) -> None:
        self._key: tuple[int, ...] | None = None
        self._tables: Tensor | None = None

    def get_or_create(self, key: tuple[int, ...], *sizes: int, **options: Any) -> Tensor:
        """Return the tables for a key, created as zeros at first use.

        Args:
            key: numbers that are equal for calls that write the same entries.
            sizes, options: arguments of `torch.zeros`.
        """
        if self._tables is None or self._key != key or self._tables.shape != sizes:
            self._key, self._tables = key, torch.zeros(*sizes, **options)
        return self._tables


def differentiate_mixer(
    inputs: ChunkInputs,
    dlogits: Tensor,
    dscores: Tensor,
    kernels: Sequence[MixerKernel],
    launch: Launch,
    shared: SharedTables | None = None,
    of_rows: RowGradients | None = None,
) -> MixerGradients:
    """Run both kernels for a chunk.

    Args:
        dlogits: [B, R, 8, C, 2], heads in pairs; undefined in columns that a row does not see.
        kernels: a kernel of `SCORE_GRADIENT_KERNELS` and one of `WEIGHT_GRADIENT_KERNELS`.
        dscores: [B, H, R, C], written in columns that a row sees; the rest of the diagonal tiles is set to zero.
        launch: runs a kernel on a grid of (blocks, sequences), on a GPU or in a test's emulator.
        shared: tables shared by calls with the same documents, or None.
        of_rows: gradients to write with gates, otherwise None.
    """
    layer, gates, form = inputs.layer, inputs.gates, kernels[1].form
    padding, fragments = form.padding, _get_fragments(inputs)
    batch, rows, _, columns, _ = dlogits.shape
    to_scores, to_weights = ((cdiv(rows, kernel.tile.rows), batch) for kernel in kernels)
    before = 0 if inputs.spans is None else MAX_TILE_COLUMNS  # a tile may begin left of column 0
    num_rows = inputs.position + cdiv(rows, BLOCK_ROWS) * BLOCK_ROWS + before + padding
    float32: dict[str, Any] = {"dtype": torch.float32, "device": dlogits.device}
    key = (*to_scores, rows, inputs.position, *((0, 0) if inputs.spans is None else inputs.spans[:2]))
    table_rows, width = num_rows if gates is None else columns, form.width
    dtables = (shared or SharedTables()).get_or_create(key, prod(to_scores), table_rows, width + HEADS, **float32)
    if of_rows is None:
        # Rows may not see the start of their document.
        new_edge = torch.empty if inputs.spans is None else torch.zeros
        dedge, drows = new_edge(batch, rows, padding, width, **float32), None
    else:
        drows, dedge = of_rows
    dweights = torch.empty(prod(to_weights), 1, 2 * fragments.w1.shape[1], **float32)
    table, edge, table_group = _find_tables(inputs)
    args = MixerBackwardArgs(
        build_score_inputs(inputs.queries, inputs.keys, columns, inputs.position, inputs.spans),
        dlogits.data_ptr(),
        *(table, edge),
        *(find_pointer(x, layer) for x in (fragments.w1, fragments.w2_back, fragments.w1_back)),
        *(x.data_ptr() for x in (dscores, dtables, dedge, dweights)),
        *(table_group, dtables.shape[1]),
        *(x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, dlogits, dedge, dscores)),
        *(() if gates is None or drows is None else (gates.inputs, drows.data_ptr(), drows.stride(0) * 4)),
    )
    grids = to_scores, (to_weights[0], batch * form.weight_slices)
    for kernel, (blocks, sequences) in zip(kernels, grids, strict=True):
        launch(kernel.code, (blocks, sequences), args)
    return MixerGradients(dtables, dedge, dweights)


def _get_fragments(inputs: ChunkInputs) -> Fragments:
    if inputs.gates is not None:
        return inputs.gates.fragments
    assert inputs.operands is not None
    return inputs.operands.fragments


def _find_tables(inputs: ChunkInputs) -> tuple[int | None, int, int]:
    """Return the addresses of the layer's U and of the chunk's first row of E, and the group of U of that row."""
    if inputs.gates is not None:
        return None, inputs.gates.edge.data_ptr(), 0
    assert inputs.operands is not None
    tables, edge = inputs.operands.find_logit_tables(inputs.position), inputs.operands.wide_edge
    row = inputs.first_row * edge.stride(1) * edge.element_size()
    return find_pointer(tables.table, inputs.layer), find_pointer(edge, inputs.layer) + row, tables.group
