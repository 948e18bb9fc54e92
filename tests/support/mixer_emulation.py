"""Random calls of the mixer's CUDA kernels, and how tests run them in the emulator."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from kernels.cdape_attention import mixer_operands
from kernels.cdape_attention.bias_product import get_bias_product
from kernels.cdape_attention.mixer_forward import LogitInputs
from kernels.cdape_attention.mixer_operands import MixerOperands
from kernels.cdape_attention.weights import PackedWeights, get_weight_shape, pack_weights
from kernels.cuda.emulate import Emulator
from kernels.cuda.kernel import CudaKernel

TAPS, PADDING = 3, 1
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

    @property
    def columns(self) -> int:
        return self.position + self.rows


SHAPES = st.builds(
    Shape, st.integers(1, 2), st.integers(9, 16), st.integers(17, 32), st.integers(1, 80), st.integers(0, 12)
).map(lambda s: Shape(s.batch, s.heads, s.width, s.rows, s.position * 8 + -(s.rows + s.position * 8) % 8))


def find_seen(shape: Shape) -> Tensor:
    return torch.arange(shape.columns) <= torch.arange(shape.rows)[:, None] + shape.position


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
    weight_shape = get_weight_shape(heads, shape.width, TAPS, True)
    weights = (
        draw(shape.width, 2 * heads, 1, TAPS, scale=0.1),
        draw(shape.width, scale=0.1),
        draw(heads, shape.width, 1, TAPS, scale=0.1),
        draw(heads),
    )
    packed = pack_weights(weight_shape, [weights], torch.bfloat16)
    product = get_bias_product(weight_shape, rows, shape.position, None, torch.bfloat16)
    bias = draw(heads, columns)
    contributions = product.compute(product.build_neighbourhoods(bias[None]), packed)
    edge_start = columns + PADDING
    return Call(
        shape,
        draw(batch, heads, rows, 64, scale=0.35).bfloat16(),
        draw(batch, heads, columns + 3, 64).bfloat16(),  # a cache may hold more
        MixerOperands(
            contributions[:, :edge_start].clone(),
            contributions[:, edge_start:].view(1, rows, PADDING, -1).clone(),
            bias[None],
            packed,
            weight_shape,
            columns,
        ),
    )


def build_logit_inputs(shape: Shape, seed: int = 0, *, residual_bias: bool = True) -> LogitInputs:
    call = draw_call(shape, torch.Generator().manual_seed(seed))
    bias = call.operands.bias_table
    operands = replace(call.operands, bias_table=bias if residual_bias else bias[..., :0])
    return LogitInputs(call.queries, call.keys, operands, 0, shape.position, 0)


def give_operands_company(operands: MixerOperands, rows: int) -> MixerOperands:
    """Return the operands as those of the second of two layers and of the last but `rows` rows of a longer call."""

    def extend(x: Tensor, dim: int, before: int, after: int) -> Tensor:
        sizes = list(x.shape)
        parts = [torch.randn(*(*sizes[:dim], n, *sizes[dim + 1 :])).to(x.dtype) for n in (before, after)]
        longer = torch.cat([parts[0], x, parts[1]], dim)
        return torch.cat([torch.randn_like(longer, dtype=torch.float32).to(x.dtype), longer])

    return replace(
        operands,
        contributions=extend(operands.contributions, 1, 0, rows),
        edge=extend(operands.edge, 1, rows, rows),
        bias_table=extend(operands.bias_table, 2, 0, rows if operands.bias_table.shape[2] else 0),
        weights=PackedWeights(*(extend(x, 1, 0, 0) for x in operands.weights)),
        last=operands.last + rows,
    )


def compute_true_logits(inputs: LogitInputs, shape: Shape) -> tuple[Tensor, Tensor]:
    """Logits in float64, and by how much rounding may change them."""
    heads, width, columns = shape.heads, shape.width, shape.columns
    hidden_columns = columns + PADDING
    scores = torch.einsum("bhid,bhjd->bhij", inputs.queries.double(), inputs.keys[:, :, :columns].double())
    scores = torch.where(find_seen(shape), scores, 0.0)
    operands = inputs.operands
    w1, w2 = operands.weights.w1[0, :, :heads, :width].double(), operands.weights.w2[0, :, :width, :heads].double()
    distance = torch.arange(shape.rows)[:, None] + shape.position - torch.arange(hidden_columns)
    hidden = operands.contributions[0].double()[(distance + PADDING).clamp(min=0)]
    hidden[:, :PADDING] = operands.edge[0].double()
    hidden = hidden.expand(shape.batch, -1, -1, -1).clone()
    size = hidden.abs()
    wide_scores = pad(scores, (PADDING, 2 * PADDING))
    for tap in range(TAPS):
        taken = wide_scores[..., tap : tap + hidden_columns]
        hidden += torch.einsum("bhij,hd->bijd", taken, w1[tap])
        size += torch.einsum("bhij,hd->bijd", taken.abs(), w1[tap].abs())
    active = torch.where(hidden > 0, hidden, SLOPE * hidden)
    # Both factors, U and the scores, were rounded, then the hidden value, and what the slope made of it.
    doubt = (2 * size + 2 * hidden.abs()) * EXCHANGE_ROUNDING + TINY
    logits, bound = scores.clone(), scores.abs() * EXCHANGE_ROUNDING
    wide, wide_doubt = pad(active, (0, 0, PADDING, 0)), pad(doubt, (0, 0, PADDING, 0))
    corrections = torch.zeros_like(scores)
    for tap in range(TAPS):
        corrections += torch.einsum("bijd,dh->bhij", wide[:, :, tap : tap + columns], w2[tap])
        bound += torch.einsum("bijd,dh->bhij", wide_doubt[:, :, tap : tap + columns], w2[tap].abs())
        part = torch.einsum("bijd,dh->bhij", wide[:, :, tap : tap + columns].abs(), w2[tap].abs())
        bound += part * EXCHANGE_ROUNDING  # what a run passes on is rounded apart
    logits += corrections
    bound += logits.abs() * EXCHANGE_ROUNDING + TINY
    logits += operands.weights.b2[0, :heads, None, None].double()
    if operands.bias_table.shape[2]:
        logits += operands.bias_table[0].double()[:, distance[:, :columns].clamp(min=0)]
    return logits, bound + logits.abs() * TINY


class Launcher:
    """Runs kernels in the emulator."""

    def __init__(self, folder: Path, *, backwards: bool = False) -> None:
        self.emulator, self.backwards = Emulator(folder), backwards

    def __call__(self, kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        self.emulator.launch(kernel, grid, arguments, backwards=self.backwards)

    @contextmanager
    def watch(self, inputs: list[Tensor]) -> Iterator[None]:
        """Let kernels access the inputs, packed operands, and new tensors, which are NaN; no more."""
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
            for name in ("build_group_table", "build_bias", "build_fragments", "build_table"):
                patch.setattr(mixer_operands, name, registered(getattr(mixer_operands, name)))
            patch.setattr(mixer_operands.F, "pad", registered(mixer_operands.F.pad))
            patch.setattr(torch, "zeros", registered(torch.zeros))
            patch.setattr(torch, "empty", registered(torch.empty, torch.nan))
            yield
