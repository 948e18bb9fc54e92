"""Random calls of the mixer's CUDA kernels, and how tests run them in the emulator."""

import ctypes
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cuda_emulator import Emulator, PlantedFault
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from megatron.kernels.cdape_attention import mixer_operands
from megatron.kernels.cdape_attention.bias_product import get_bias_product
from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32
from megatron.kernels.cdape_attention.geometry import FOLDER, HEADS, WIDTH, KernelFamily, KernelForm, MixerKernel, Tile
from megatron.kernels.cdape_attention.mixer import ChunkInputs, ColumnSpans
from megatron.kernels.cdape_attention.mixer_operands import MAX_TILE_COLUMNS, MixerOperands
from megatron.kernels.cdape_attention.weights import PackedWeights, get_weight_shape, pack_weights
from megatron.kernels.cuda.compile import CudaKernel

NO_ERRORS = (0, 0, 0, 0, 0)
EXCHANGE_ROUNDING = 2.0**-11
"""Relative to a number, half a unit in the last place of float16."""
SLOPE = float(torch.tensor(0.01, dtype=torch.float16))
TINY = 2.0**-20
"""Errors of sums in float32."""


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    width: int
    rows: int
    position: int
    window: int | None = None
    starts: frozenset[int] | None = None
    """First columns of documents, including 0; 7 columns later in the second sequence."""
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    taps: int = 3
    is_linear: bool = False

    @property
    def padding(self) -> int:
        return self.taps // 2

    @property
    def columns(self) -> int:
        return self.position + self.rows

    @property
    def left(self) -> int:
        """Position of the maps' first column."""
        return (
            0 if self.window is None else max(self.position - self.window + 1, 0) // MAX_TILE_COLUMNS * MAX_TILE_COLUMNS
        )

    @property
    def document_starts(self) -> Tensor | None:
        if self.starts is None:
            return None
        sequences = [
            [max([0, *(s + 7 * b for s in self.starts if s + 7 * b <= i)]) for i in range(self.position, self.columns)]
            for b in range(self.batch)
        ]
        return torch.tensor(sequences, dtype=torch.int32)

    @property
    def spans(self) -> ColumnSpans | None:
        if self.window is None and self.starts is None:
            return None
        return ColumnSpans(NO_WINDOW_INT32 if self.window is None else self.window, self.left, self.document_starts)


def _round_columns(shape: Shape) -> Shape:
    position = shape.position * 8
    return replace(shape, position=position + -(shape.rows + position) % 8)


SIZES = (st.integers(1, 2), st.integers(1, 16), st.integers(1, 32), st.integers(1, 80), st.integers(0, 12))
SHAPES = st.builds(Shape, *SIZES).map(_round_columns)
WINDOWS = st.none() | st.integers(1, 70)
STARTS = st.none() | st.frozensets(st.integers(1, 150) | st.sampled_from([31, 32, 33, 63, 64]), max_size=6)
LOCAL_SHAPES = (
    st.builds(Shape, *SIZES, WINDOWS, STARTS).map(_round_columns).filter(lambda shape: shape.spans is not None)
)
LOCAL_EXAMPLES = (
    Shape(1, 9, 17, 40, 0, None, frozenset({1, 2, 3, 33})),  # documents of one token
    Shape(2, 12, 32, 72, 8, None, frozenset({31, 32, 63})),
    Shape(1, 16, 32, 72, 64, 33, None),
    Shape(1, 9, 17, 64, 64, 1, None),
    Shape(2, 10, 20, 72, 96, 40, frozenset({70, 130})),
)


def find_documents(shape: Shape) -> Tensor:
    """First column of each row's document, [B, R, 1]."""
    document_starts = shape.document_starts
    return (
        torch.zeros(shape.batch, shape.rows, 1, dtype=torch.int32)
        if document_starts is None
        else document_starts[..., None]
    )


class Case(NamedTuple):
    """Geometry and type for which a kernel is compiled."""

    rows: int
    columns: int
    dim: int
    dtype: torch.dtype
    taps: int = 3
    held_tensors: int | None = None
    heads: int = HEADS
    width: int = WIDTH
    is_linear: bool = False

    def build(self, family: KernelFamily, inputs: ChunkInputs) -> MixerKernel:
        return self.build_for_rows(family, is_local=inputs.spans is not None)

    def build_for_rows(self, family: KernelFamily, *, is_local: bool, is_gated: bool = False) -> MixerKernel:
        """Describe the kernel, with `held_tensors` tensors in shared memory, or by default as many as fit."""
        kernel = self.find_for_rows(family, is_local=is_local, is_gated=is_gated)
        assert kernel is not None
        return kernel

    def find_for_rows(self, family: KernelFamily, *, is_local: bool, is_gated: bool = False) -> MixerKernel | None:
        """Return the same kernel, or None if the family has none of this geometry or size."""
        held = (self.held_tensors,) if self.held_tensors else (2, 1)
        tiles = [tile for x in held if (tile := Tile(self.rows, self.columns, x)) in family.tiles]
        sizes = (self.taps, self.dim, self.dtype, is_local, self.heads, self.width)
        form = KernelForm(*sizes, is_gated, self.is_linear)
        return family.build(tiles[0], form, 90) if tiles and family.covers(form) else None

    def adapt(self, shape: Shape) -> Shape:
        heads, width = shape.heads, shape.width
        if self.heads > HEADS:
            heads, width = heads + HEADS, max(width, WIDTH // 2 + 1)  # two slices
        if self.width > WIDTH:
            width += WIDTH
        own = {"dim": self.dim, "dtype": self.dtype, "taps": self.taps, "is_linear": self.is_linear}
        return replace(shape, heads=heads, width=width, **own)


CASES = [
    Case(32, 32, 64, torch.bfloat16),
    Case(16, 64, 80, torch.float16),
    Case(16, 64, 80, torch.float16, 1),
    Case(16, 64, 128, torch.bfloat16, 5),
    Case(16, 32, 96, torch.bfloat16),
    Case(32, 32, 64, torch.bfloat16, 1),
    Case(16, 64, 64, torch.bfloat16, 7),
    Case(32, 32, 64, torch.bfloat16, width=64),
]
SEVEN_TAPS = CASES[6]
LINEAR_CASE = Case(32, 32, 64, torch.bfloat16, 1, is_linear=True)
LOCAL_CASES = [*CASES[:3], SEVEN_TAPS]
ROUNDINGS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Relative to a number, half of the largest rounding error of the types."""


def find_seen(shape: Shape) -> Tensor:
    """True where a row sees a column, [B, 1, R, C]."""
    distance = torch.arange(shape.rows)[:, None] + shape.position - torch.arange(shape.columns)
    is_inside = torch.arange(shape.columns) >= find_documents(shape)
    return ((distance >= 0) & (distance < (shape.window or shape.columns)) & is_inside)[:, None]


@dataclass(frozen=True)
class Call:
    """Random inputs that the kernels of both passes read."""

    shape: Shape
    queries: Tensor
    keys: Tensor
    operands: MixerOperands


def draw_call(shape: Shape, generator: torch.Generator) -> Call:
    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=generator) * scale

    batch, heads, rows, columns = shape.batch, shape.heads, shape.rows, shape.columns
    weight_shape = get_weight_shape(heads, shape.width, shape.taps, True)
    weights = (
        draw(shape.width, 2 * heads, 1, shape.taps, scale=0.1),
        draw(shape.width, scale=0.1),
        draw(heads, shape.width, 1, shape.taps, scale=0.1),
        draw(heads),
    )
    packed = pack_weights(weight_shape, [weights], shape.dtype)
    of_rows = (rows, shape.position) if shape.starts is None else (columns, 0)
    product = get_bias_product(weight_shape, *of_rows, shape.window, shape.dtype)
    bias = draw(heads, columns)
    contributions = product.compute(product.build_neighborhoods(bias[None]), packed)
    edge_start = columns + shape.padding
    return Call(
        shape,
        draw(batch, heads, rows, shape.dim, scale=2.8 / shape.dim**0.5).to(shape.dtype),
        draw(batch, heads, columns + 3, shape.dim).to(shape.dtype)[:, :, shape.left :],  # a cache may hold more
        MixerOperands(
            contributions[:, :edge_start].clone(),
            contributions[:, edge_start:].view(1, of_rows[0], shape.padding, shape.width).clone(),
            bias[None],
            packed,
            weight_shape,
            columns,
        ),
    )


def build_logit_inputs(shape: Shape, seed: int = 0, *, residual_bias: bool = True) -> ChunkInputs:
    call = draw_call(shape, torch.Generator().manual_seed(seed))
    bias = call.operands.bias_table
    operands = replace(call.operands, bias_table=bias if residual_bias else bias[..., :0])
    return ChunkInputs(call.queries, call.keys, operands, 0, 0, shape.position - shape.left, shape.spans)


def unpack_operands(inputs: ChunkInputs) -> ChunkInputs:
    """Return the same inputs without cached packed operands."""
    return inputs._replace(operands=replace(inputs.operands))  # type: ignore[type-var]


def move_into_longer_call(inputs: ChunkInputs) -> ChunkInputs:
    """Return the same inputs as the second of two layers, in a chunk with rows before and after it."""
    rows = 40

    def extend(x: Tensor, dim: int, before: int, after: int) -> Tensor:
        sizes = list(x.shape)
        parts = [torch.randn(*(*sizes[:dim], n, *sizes[dim + 1 :])).to(x.dtype) for n in (before, after)]
        longer = torch.cat([parts[0], x, parts[1]], dim)
        return torch.cat([torch.randn(longer.shape).to(x.dtype), longer])

    operands = inputs.operands
    operands = replace(
        operands,
        contributions=extend(operands.contributions, 1, 0, rows),
        edge=extend(operands.edge, 1, rows, rows),
        bias_table=extend(operands.bias_table, 2, 0, rows if operands.bias_table.shape[2] else 0),
        weights=PackedWeights(*(extend(x, 1, 0, 0) for x in operands.weights)),
        last=operands.last + rows,
    )
    return inputs._replace(operands=operands, layer=1, first_row=rows)  # type: ignore[type-var]


class Hidden(NamedTuple):
    """Inputs of hidden values in float64, for p columns more than logits. B sequences, R rows, D widths."""

    scores: Tensor
    """[B, H, R, C], zero where a row does not see a column."""
    begin: Tensor
    """U or E, [B, R, C + p, D]."""
    is_alive: Tensor
    """[B, R, C + p]."""
    at_edge: Tensor
    """True where E is valid, as for U."""
    distance: Tensor
    """[R, C + p]."""


def begin_hidden(inputs: ChunkInputs, shape: Shape) -> Hidden:
    columns, padding = shape.columns, shape.padding
    keys = pad(inputs.keys[:, :, : columns - shape.left].double(), (0, 0, shape.left, 0))
    scores = torch.einsum("bhid,bhjd->bhij", inputs.queries.double(), keys)
    positions, column = torch.arange(shape.rows)[:, None] + shape.position, torch.arange(columns + padding)
    distance, place = positions - column, column - find_documents(shape)
    begin = inputs.operands.contributions[0].double()[(distance + padding).clamp(min=0)].expand(shape.batch, -1, -1, -1)
    rows = torch.arange(shape.rows).expand(shape.batch, -1)
    of_row = (rows if shape.starts is None else rows + shape.position - find_documents(shape)[..., 0])[..., None]
    edge = inputs.operands.edge[0].double()[of_row, place.clamp(0, padding - 1)] if padding else begin
    at_edge = (place >= 0) & (place < padding)
    is_alive = (distance >= -padding) & (place >= 0)
    return Hidden(
        torch.where(find_seen(shape), scores, 0.0),
        torch.where(at_edge[..., None], edge, begin),
        is_alive,
        at_edge,
        distance,
    )


def find_inputs(inputs: ChunkInputs) -> list[Tensor]:
    """Return the tensors that kernels read without packing."""
    keys = inputs.keys if inputs.keys._base is None else inputs.keys._base
    documents = None if inputs.spans is None else inputs.spans.document_starts
    return [inputs.queries, keys, inputs.operands.edge, *([] if documents is None else [documents])]


def count_slices(operands: MixerOperands) -> int:
    """Return the number of slices of the width in the logits."""
    return math.prod(operands.padded_sizes) // (HEADS * WIDTH) * (2 if operands.shape.kernel_size > 5 else 1)


def compute_true_logits(inputs: ChunkInputs, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return logits in float64 and bounds of their rounding errors, from column 0 on."""
    heads, width, columns, padding = shape.heads, shape.width, shape.columns, shape.padding
    hidden_columns = columns + padding
    scores, hidden, is_alive, _, distance = begin_hidden(inputs, shape)
    operands = inputs.operands
    w1, w2 = operands.weights.w1[0, :, :heads, :width].double(), operands.weights.w2[0, :, :width, :heads].double()
    size = hidden.abs()
    wide_scores = pad(scores, (padding, 2 * padding))
    for tap in range(shape.taps):
        taken = wide_scores[..., tap : tap + hidden_columns]
        hidden = hidden + torch.einsum("bhij,hd->bijd", taken, w1[tap])
        size = size + torch.einsum("bhij,hd->bijd", taken.abs(), w1[tap].abs())
    hidden, size = (torch.where(is_alive[..., None], x, 0.0) for x in (hidden, size))
    active = torch.where(hidden > 0, hidden, (1.0 if shape.is_linear else SLOPE) * hidden)
    # Both factors, U and the scores, were rounded, then the hidden value and its product with the slope.
    doubt = (2 * size + 2 * hidden.abs()) * EXCHANGE_ROUNDING + TINY
    logits, bound = scores.clone(), scores.abs() * EXCHANGE_ROUNDING
    more = count_slices(operands) - 1  # slices that add to the sums of earlier ones
    bound = bound * (1 + more)
    wide, wide_doubt = pad(active, (0, 0, padding, 0)), pad(doubt, (0, 0, padding, 0))
    corrections = torch.zeros_like(scores)
    for tap in range(shape.taps):
        corrections += torch.einsum("bijd,dh->bhij", wide[:, :, tap : tap + columns], w2[tap])
        bound += torch.einsum("bijd,dh->bhij", wide_doubt[:, :, tap : tap + columns], w2[tap].abs())
        part = torch.einsum("bijd,dh->bhij", wide[:, :, tap : tap + columns].abs(), w2[tap].abs())
        bound += part * EXCHANGE_ROUNDING * (1 + 2 * more)  # a run's contribution to the next run is rounded separately
    logits += corrections
    bound += logits.abs() * EXCHANGE_ROUNDING + TINY
    logits += operands.weights.b2[0, :heads, None, None].double()
    if operands.bias_table.shape[2]:
        logits += operands.bias_table[0].double()[:, distance[:, :columns].clamp(min=0)]
    return logits, bound + logits.abs() * TINY


class Launcher:
    """Runs kernels in the emulator."""

    def __init__(self, fault: PlantedFault | None = None, *, backwards: bool = False) -> None:
        self.emulator, self.backwards = Emulator(FOLDER, fault), backwards

    def __call__(self, kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        self.emulator.launch(kernel, grid, arguments, backwards=self.backwards)

    @contextmanager
    def watch(self, inputs: list[Tensor]) -> Iterator[None]:
        """Allow kernels to access only the inputs, packed operands, and new tensors, which are filled with NaN."""
        self.emulator.begin(inputs)
        kept: list[Tensor] = []

        def registered(build: Callable[..., object], fill: float | None = None) -> Callable[..., object]:
            def make(*args: object, **options: object) -> object:
                made = build(*args, **options)
                for x in made if isinstance(made, tuple) else (made,):
                    if isinstance(x, Tensor):
                        if fill is not None:
                            x.fill_(fill)
                        kept.append(x)
                        self.emulator.register(x if x.is_contiguous() or x._base is None else x._base)
                return made

            return make

        with pytest.MonkeyPatch.context() as patch:
            for name in ("build_group_table", "build_bias", "build_fragments"):
                patch.setattr(mixer_operands, name, registered(getattr(mixer_operands, name)))
            patch.setattr(mixer_operands.F, "pad", registered(mixer_operands.F.pad))
            patch.setattr(torch, "zeros", registered(torch.zeros))
            patch.setattr(torch, "empty", registered(torch.empty, torch.nan))
            yield


def plant_fault(folder: Path, kernel: str, right: str, wrong: str) -> PlantedFault:
    """Copy the kernels' sources to a new folder, and replace an expression that occurs once in them.

    Args:
        kernel: part of the name of the kernel that is to have the fault.
    """
    shutil.copytree(FOLDER, folder)
    sources = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.h")}
    (path,) = (path for path, source in sources.items() if right in source)
    assert sources[path].count(right) == 1
    path.write_text(sources[path].replace(right, wrong), encoding="utf-8")
    return PlantedFault(folder, kernel)


class AllMemory:
    """Memory accessible to the process, as an array that kernels may access."""

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return 1 << 60

    def element_size(self) -> int:
        return 1
