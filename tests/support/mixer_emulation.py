"""Random calls of the mixer's CUDA kernels, and how tests run them in the emulator."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from kernels.cdape_attention.bias_product import get_bias_product
from kernels.cdape_attention.geometry import KernelFamily, MixerKernel, Tile
from kernels.cdape_attention.mixer_forward import LogitInputs
from kernels.cdape_attention.weights import PackedWeights, WeightShape, get_weight_shape, pack_weights
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
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def columns(self) -> int:
        return self.position + self.rows


SHAPES = st.builds(
    Shape, st.integers(1, 2), st.integers(9, 16), st.integers(17, 32), st.integers(1, 80), st.integers(0, 12)
).map(lambda s: Shape(s.batch, s.heads, s.width, s.rows, s.position * 8 + -(s.rows + s.position * 8) % 8))


class Case(NamedTuple):
    """What a kernel is compiled for."""

    rows: int
    columns: int
    dim: int
    dtype: torch.dtype

    def build(self, family: KernelFamily) -> MixerKernel:
        return family.build(Tile(self.rows, self.columns), self.dim, self.dtype, 90)

    def adapt(self, shape: Shape) -> Shape:
        return replace(shape, dim=self.dim, dtype=self.dtype)


CASES = [
    Case(32, 32, 64, torch.bfloat16),
    Case(16, 64, 80, torch.float16),
    Case(16, 64, 128, torch.bfloat16),
    Case(16, 32, 96, torch.bfloat16),
]
ROUNDINGS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Relative to a number, half a unit in the last place of the types."""


def find_seen(shape: Shape) -> Tensor:
    return torch.arange(shape.columns) <= torch.arange(shape.rows)[:, None] + shape.position


@dataclass(frozen=True)
class Call:
    """Random inputs that the kernels of both passes read."""

    shape: Shape
    queries: Tensor
    keys: Tensor
    contributions: Tensor
    edge: Tensor
    bias: Tensor
    weights: PackedWeights
    weight_shape: WeightShape


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
    packed = pack_weights(weight_shape, [weights], shape.dtype)
    product = get_bias_product(weight_shape, rows, shape.position, None, shape.dtype)
    bias = draw(heads, columns)
    contributions = product.compute(product.build_neighbourhoods(bias[None]), packed)[0]
    edge_start = columns + PADDING
    return Call(
        shape,
        draw(batch, heads, rows, shape.dim, scale=2.8 / shape.dim**0.5).to(shape.dtype),
        draw(batch, heads, columns + 3, shape.dim).to(shape.dtype),  # a cache may hold more
        contributions[:edge_start].clone(),
        contributions[edge_start:].view(rows, PADDING, -1).clone(),
        bias,
        PackedWeights(*(x[0] for x in packed)),
        weight_shape,
    )


def build_logit_inputs(shape: Shape, seed: int = 0, *, residual_bias: bool = True) -> LogitInputs:
    call = draw_call(shape, torch.Generator().manual_seed(seed))
    table = call.bias if residual_bias else call.bias[:, :0]
    bias = (call.contributions, call.edge, table)
    return LogitInputs(call.queries, call.keys, *bias, call.weights, call.weight_shape, shape.position)


def compute_true_logits(inputs: LogitInputs, shape: Shape) -> tuple[Tensor, Tensor]:
    """Logits in float64, and by how much rounding may change them."""
    heads, width, columns = shape.heads, shape.width, shape.columns
    hidden_columns = columns + PADDING
    scores = torch.einsum("bhid,bhjd->bhij", inputs.queries.double(), inputs.keys[:, :, :columns].double())
    scores = torch.where(find_seen(shape), scores, 0.0)
    w1, w2 = inputs.weights.w1[:, :heads, :width].double(), inputs.weights.w2[:, :width, :heads].double()
    distance = torch.arange(shape.rows)[:, None] + shape.position - torch.arange(hidden_columns)
    hidden = inputs.contributions.double()[(distance + PADDING).clamp(min=0)]
    hidden[:, :PADDING] = inputs.edge.double()
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
    logits += inputs.weights.b2[:heads, None, None].double()
    if inputs.bias_table.shape[1]:
        logits += inputs.bias_table.double()[:, distance[:, :columns].clamp(min=0)]
    return logits, bound + logits.abs() * TINY


class Launcher:
    """Runs kernels in the emulator."""

    def __init__(self, folder: Path, *, backwards: bool = False) -> None:
        self.emulator, self.backwards = Emulator(folder), backwards

    def __call__(self, kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        self.emulator.launch(kernel, grid, arguments, backwards=self.backwards)

    @contextmanager
    def watch(self, inputs: list[Tensor], module: ModuleType, builders: list[str]) -> Iterator[None]:
        """Let kernels access the inputs, what the module's functions build, and new tensors, which are NaN; no more."""
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
                        self.emulator.register(x)
                return made

            return make

        with pytest.MonkeyPatch.context() as patch:
            for name in builders:
                patch.setattr(module, name, registered(getattr(module, name)))
            patch.setattr(module.F, "pad", registered(module.F.pad))
            patch.setattr(torch, "zeros", registered(torch.zeros))
            patch.setattr(torch, "empty", registered(torch.empty, torch.nan))
            yield
