"""The processor's backward pass by CUDA kernels (`cuda/mixer_backward.h`): what they read, how they are launched, and
what is made of their sums.

B batch, H heads, R query rows of a chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. The kernels pad H to 16 and D to 32.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.geometry import ELEMENTS, HEADS, WIDTH, KernelFamily, MixerKernel, Tile
from kernels.cdape_attention.scores import padded_channels
from kernels.cdape_attention.weights import PackedWeights, WeightShape
from kernels.cuda.compile import load_nvrtc
from kernels.cuda.kernel import CudaKernel
from kernels.jit_build import CompileError
from kernels.runtime import DeviceProperties, cdiv

VARIABLE = "FARFIELD_CUDA_MIXER"
"""Environment variable that turns all CUDA kernels off if it is 0: Triton's then compute everything."""
BLOCK_ROWS = 32
"""The most rows that a block takes."""
MAX_TILE_COLUMNS = 64
MAX_HEAD_DIM = 128
TABLE_FRONT = 96
"""Entries of U in front of distance 0: tiles at the diagonal look so far ahead."""
LARGEST_EXCHANGED = torch.finfo(torch.float16).max
TO_SCORES = KernelFamily(
    *("mixer_backward.h", "MixerBackward<{}, true, false>", "MixerBackwardArgs"),
    ((Tile(32, 32), 165376), (Tile(16, 64), 166656), (Tile(16, 32), 82688)),
)
TO_WEIGHTS = KernelFamily(
    *("mixer_backward.h", "MixerBackward<{}, false, true>", "MixerBackwardArgs"),
    ((Tile(32, 32), 87040), (Tile(16, 64), 76288), (Tile(16, 32), 43520)),
)


Launch = Callable[[CudaKernel, tuple[int, int], ctypes.Structure], None]
"""Runs a kernel on a grid of (blocks, sequences)."""


class ScoreInputs(ctypes.Structure):
    """Inputs of scores, as `cuda/scores.h` declares them."""

    _fields_ = (
        *(("first_keys", ctypes.c_void_p), ("first_keys_batch", ctypes.c_longlong)),
        *((name, ctypes.c_int) for name in ("rows", "columns", "position", "window", "origin", "edge_position")),
        *((name, ctypes.c_void_p) for name in ("q", "k")),
        *((name, ctypes.c_int) for name in ("q_stride", "k_stride", "heads")),
    )


class MixerBackwardArgs(ctypes.Structure):
    """Arguments of both kernels, as `cuda/mixer_backward.h` declares them."""

    _fields_ = (
        ("scores", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("dlogits", "table", "edge", "w1", "w2", "w1_back")),
        *((name, ctypes.c_void_p) for name in ("dscores", "dtables", "dedge", "dweights")),
        *((name, ctypes.c_int) for name in ("table_front", "dtable_rows")),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "map_batch", "edge_batch", "dscores_batch")),
    )


class Spans(NamedTuple):
    """The columns that a chunk's rows see, if not all from position 0 on: of a window, of a document, or of both."""

    window: int
    left: int
    """Position of the maps' first column."""
    first_keys: Tensor | None
    """int32 [B, R], contiguous: positions at which the rows' documents begin; None if that is 0."""


class MixerInputs(NamedTuple):
    """Inputs of both kernels for one chunk of rows."""

    queries: Tensor
    """[B, H, R, d], scaled: rows of a tensor whose last two dimensions are contiguous."""
    keys: Tensor
    """[B, H, C or more, d], alike."""
    dlogits: Tensor
    """[B, R, 8, C, 2], heads in pairs; undefined where a row does not see the column."""
    contributions: Tensor
    """float32 [p + N + …, D]: U from distance −p on (`bias_product.py`)."""
    edge: Tensor
    """float32 [R, p, D]: E of the chunk's rows, or with documents of all positions in one."""
    weights: PackedWeights
    shape: WeightShape
    position: int
    """Column of the chunk's first row: its position, if the maps begin at position 0."""
    spans: Spans | None = None


class MixerGradients(NamedTuple):
    """Gradients of a chunk, summed over sequences and rows."""

    contributions: Tensor
    """Gradient of U, float32 [n, D], from distance −p on."""
    bias_table: Tensor
    """Gradient of the bias table in the logits, float32 [n, H], by distance."""
    edge: Tensor
    """Gradient of E, float32 [B, R, p, D]."""
    patches: Tensor
    """Gradients of both weights in the layout of `PackedWeights`, float32 [2, KC, DP]."""


def is_enabled() -> bool:
    """True unless the environment forbids these kernels."""
    return os.environ.get(VARIABLE) != "0"


@cache
def has_compiler() -> bool:
    """True if NVRTC is here; if not, a warning says so once."""
    try:
        load_nvrtc()
    except CompileError as failure:
        warnings.warn(f"CDAPE's CUDA kernels are left, Triton's take their place: {failure}", stacklevel=2)
        return False
    return True


def fills_device(rows: int, batch: int, device: DeviceProperties) -> bool:
    """True if a chunk has a block for each multiprocessor, on which no second one fits.

    With fewer, Triton's smaller programs are faster: on an H200 a micro-batch of 512 tokens of the 350M model, which
    has 16 blocks, took 20 ms with these kernels and kept the GPU busy for 12 ms with Triton's (docs/log.md).
    """
    return cdiv(rows, BLOCK_ROWS) * batch >= device.multi_processor_count


def is_supported(shape: WeightShape, dtype: torch.dtype, dim: int, columns: int) -> bool:
    """True if some GPU has kernels for these shapes: half precision, three taps, up to 16 heads of dimensions that are
    a multiple of 16, widths of up to 32.

    Fewer heads or widths are padded. With at most half of both, Triton's kernels have no more instructions (README.md).
    """
    return (
        dtype in ELEMENTS
        and dim % 16 == 0
        and dim <= MAX_HEAD_DIM
        and shape.kernel_size == 3
        and shape.heads <= HEADS
        and shape.width <= WIDTH
        and (shape.heads > HEADS // 2 or shape.width > WIDTH // 2)
        and columns % 8 == 0
    )


def build_score_inputs(
    queries: Tensor, keys: Tensor, columns: int, position: int, spans: Spans | None = None
) -> ScoreInputs:
    """Describe a chunk's queries [B, H, R, d] and keys [B, H, C or more, d] for a kernel."""
    heads, rows = queries.shape[1:3]
    strides = (x.stride(1) * x.element_size() for x in (queries, keys))
    own: tuple[int, ...] = (0, 0, 0)
    documents: tuple[int | None, int] = (None, 0)
    if spans is not None:
        own = (spans.window, spans.left, position + spans.left if spans.first_keys is None else 0)
        if spans.first_keys is not None:
            documents = (spans.first_keys.data_ptr(), spans.first_keys.stride(0) * 4)
    tensors = (queries.data_ptr(), keys.data_ptr())
    return ScoreInputs(*documents, rows, columns, position, *own, *tensors, *strides, heads)


def count_distances(rows: int, position: int, spans: Spans | None) -> int:
    """How many distances kernels may look up for a chunk whose first row stands at this column."""
    before = 0 if spans is None else MAX_TILE_COLUMNS  # a tile may begin left of column 0
    return position + cdiv(rows, BLOCK_ROWS) * BLOCK_ROWS + before


def differentiate_mixer(
    inputs: MixerInputs, dscores: Tensor, kernels: tuple[MixerKernel, MixerKernel], launch: Launch
) -> MixerGradients:
    """Run both kernels for a chunk.

    Args:
        kernels: of `TO_SCORES` and `TO_WEIGHTS`.
        dscores: [B, H, R, C], written where a row sees a column, and zero in the rest of the diagonal tiles.
        launch: runs a kernel on a grid of (blocks, sequences): on a GPU, or in a test's emulator.
    """
    shape, padding = inputs.shape, inputs.shape.padding
    batch, rows, _, columns, _ = inputs.dlogits.shape
    to_scores, to_weights = ((cdiv(rows, kernel.tile.rows), batch) for kernel in kernels)
    distances = count_distances(rows, inputs.position, inputs.spans)
    table = build_table(inputs.contributions, padding, distances)
    edge = F.pad(inputs.edge, (0, WIDTH - shape.width))
    fragments = build_fragments(inputs.weights)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": table.device}
    dtables = torch.zeros(prod(to_scores), distances + padding, WIDTH + HEADS, **float32)
    new_edge = torch.empty if inputs.spans is None else torch.zeros  # rows may not see their document's begin
    dedge = new_edge(batch, rows, padding, WIDTH, **float32)
    dweights = torch.empty(prod(to_weights), 2 * shape.kernel_size * 4 * 32 * 4, **float32)
    args = MixerBackwardArgs(
        build_score_inputs(inputs.queries, inputs.keys, columns, inputs.position, inputs.spans),
        *(x.data_ptr() for x in (inputs.dlogits, table, edge, *fragments, dscores, dtables, dedge, dweights)),
        *(TABLE_FRONT, dtables.shape[1]),
        *(x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, inputs.dlogits, dedge, dscores)),
    )
    for kernel, grid in zip(kernels, (to_scores, to_weights), strict=True):
        launch(kernel.code, grid, args)
    sums = dtables.sum(0)
    return MixerGradients(
        sums[:, : shape.width],
        sums.index_select(1, _list_head_columns(sums.device))[:, : shape.heads],
        dedge[..., : shape.width],
        unpack_weights(dweights.sum(0), shape),
    )


def build_table(contributions: Tensor, padding: int, distances: int) -> Tensor:
    """U in the order of accumulators, float32 [entries, 64]: entry e has distances e − front and e − front + 8."""
    width = contributions.shape[1]
    entries = TABLE_FRONT + distances
    entries += entries % 2
    covered = min(contributions.shape[0], distances + padding + 8)
    room = entries + 8 - (TABLE_FRONT - padding) - covered
    padded = F.pad(contributions[:covered], (0, WIDTH - width, TABLE_FRONT - padding, room))
    halves = padded.index_select(1, _list_table_columns(padded.device))  # [rows, entry's parity, step, n, t, 2]
    row = halves.shape[1]
    sizes = (entries // 2, 2, 2, 2, 4, 2, 2)  # entry, its parity, step, n, t, distance, width
    strides = (2 * row, row + row // 2, 16, 8, 2, 8 * row, 1)
    return halves.as_strided(sizes, strides).contiguous().view(entries, 2 * WIDTH)


def build_fragments(weights: PackedWeights) -> tuple[Tensor, Tensor, Tensor]:
    """W1 in float16, W2ᵀ and W1ᵀ as operands of products: [k, 4, 32 lanes, 4]."""
    indices = _build_fragment_indices(weights.w1.shape[0], weights.w1.device)
    w1, w2 = _pad_weights(weights)
    return (
        _exchange(w1).index_select(0, indices.w1),
        w2.index_select(0, indices.w2_back),
        w1.index_select(0, indices.w1_back),
    )


def exchange_fragments(weights: PackedWeights) -> tuple[Tensor, Tensor]:
    """W1 and W2 in float16 as operands of products: [k, 4, 32 lanes, 4]."""
    indices = _build_fragment_indices(weights.w1.shape[0], weights.w1.device)
    w1, w2 = map(_exchange, _pad_weights(weights))
    return w1.index_select(0, indices.w1), w2.index_select(0, indices.w2)


def _pad_weights(weights: PackedWeights) -> tuple[Tensor, Tensor]:
    """W1 [k, 16, 32] and W2 [k, 32, 16], flat."""
    missing = WIDTH - weights.w1.shape[2]
    if missing == 0:
        return weights.w1.flatten(), weights.w2.flatten()
    return F.pad(weights.w1, (0, missing)).flatten(), F.pad(weights.w2, (0, 0, 0, missing)).flatten()


def _exchange(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_EXCHANGED, LARGEST_EXCHANGED).to(torch.float16)


def unpack_weights(sums: Tensor, shape: WeightShape) -> Tensor:
    """The weights' gradients in the order of `PackedWeights.patches1` and `patches2`: [2, KC, DP]."""
    index = _build_patch_index(shape, sums.device)
    return F.pad(sums, (0, 1)).index_select(0, index).view(2, *shape.packed[2])


def _width(tile: int | Tensor, column: int | Tensor) -> int | Tensor:
    """The width that stands in a column of an n-tile, so that a lane has four neighbors."""
    return 16 * (tile // 2) + 4 * (column // 2) + 2 * (tile % 2) + column % 2


@cache
def _list_table_columns(device: torch.device) -> Tensor:
    """Columns of U by parity of the entry, step, n, t and width: n is swapped where the parity is odd."""
    columns = [
        _width(2 * step + (n ^ parity), 2 * t + x)
        for parity in range(2)
        for step in range(2)
        for n in range(2)
        for t in range(4)
        for x in range(2)
    ]
    return torch.tensor(columns, device=device)


@cache
def _list_head_columns(device: torch.device) -> Tensor:
    """Return the columns of heads 0 … 15 in the sums along diagonals."""
    columns = [WIDTH + h % 8 // 2 * 4 + h // 8 * 2 + h % 2 for h in range(HEADS)]
    return torch.tensor(columns, device=device)


class _FragmentIndices(NamedTuple):
    """Indices of operands of products, into W1 [k, 16, 32] or W2 [k, 32, 16]."""

    w1: Tensor
    w2: Tensor
    w1_back: Tensor
    w2_back: Tensor


@cache
def _build_fragment_indices(taps: int, device: torch.device) -> _FragmentIndices:
    tap, tile, lane, word, half = torch.meshgrid(*(torch.arange(n) for n in (taps, 4, 32, 2, 2)), indexing="ij")
    g, t = lane // 4, lane % 4
    head, width = 2 * t + 8 * word + half, _width(tile, g)
    w1 = (tap * HEADS + head) * WIDTH + width
    w2_back = (tap * WIDTH + width) * HEADS + head
    step, n = tile // 2, tile % 2
    head, width = 8 * n + g, _width(2 * step + word, 2 * t + half)
    w1_back = (tap * HEADS + head) * WIDTH + width
    w2 = (tap * WIDTH + width) * HEADS + head
    return _FragmentIndices(*(x.flatten().to(device) for x in (w1, w2, w1_back, w2_back)))


@cache
def _build_patch_index(shape: WeightShape, device: torch.device) -> Tensor:
    """Into sums [2, k, 4 n-tiles, 32 lanes, 4], which are followed by a zero."""
    taps = shape.kernel_size
    which, tap, tile, lane, x = torch.meshgrid(*(torch.arange(n) for n in (2, taps, 4, 32, 4)), indexing="ij")
    head, width = lane // 4 + 8 * (x // 2), _width(tile, 2 * (lane % 4) + x % 2)
    mirrored = torch.where(which == 0, tap, taps - 1 - tap)  # the taps of the second are (`weights.py`)
    channels, (rows, columns) = padded_channels(shape.heads), shape.packed[2]
    is_kept = (head < channels) & (width < columns)
    place = (which * rows + mirrored * channels + head) * columns + width
    index = torch.full((2 * rows * columns,), place.numel())
    index[place[is_kept]] = torch.arange(place.numel()).view_as(place)[is_kept]
    return index.to(device)
