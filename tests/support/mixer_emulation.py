"""Random calls of the mixer's CUDA kernels, and how tests run them in the emulator."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.cdape_attention.bias_product import get_bias_product
from kernels.cdape_attention.weights import PackedWeights, WeightShape, get_weight_shape, pack_weights
from kernels.cuda.emulate import Emulator
from kernels.cuda.kernel import CudaKernel

TAPS, PADDING = 3, 1
NO_ERRORS = (0, 0, 0, 0, 0)


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
    packed = pack_weights(weight_shape, [weights], torch.bfloat16)
    product = get_bias_product(weight_shape, rows, shape.position, None, torch.bfloat16)
    bias = draw(heads, columns)
    contributions = product.compute(product.build_neighbourhoods(bias[None]), packed)[0]
    edge_start = columns + PADDING
    return Call(
        shape,
        draw(batch, heads, rows, 64, scale=0.35).bfloat16(),
        draw(batch, heads, columns + 3, 64).bfloat16(),  # a cache may hold more
        contributions[:edge_start].clone(),
        contributions[edge_start:].view(rows, PADDING, -1).clone(),
        bias,
        PackedWeights(*(x[0] for x in packed)),
        weight_shape,
    )


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
