"""Calls of the CDAPE operator with all gradients, and their exact results.

B batch, H heads, R query rows, C key columns, d head dimension, D processor width, k kernel size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kernel_references
import torch
from torch import Tensor

from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.chunks import CdapeProblem
from megatron.kernels.cdape_attention.weights import PackedWeights, WeightShape

NAMES = ("output", "q", "k", "v", "bias", "w1", "b1", "w2", "b2")
"""Output, then the operator's tensors, to which sinks and a map of heads may be added."""


@dataclass(frozen=True)
class Case:
    """Arguments of one operator call."""

    batch: int
    heads: int
    rows: int
    columns: int
    dim: int
    width: int
    size: int
    offset: int = 0
    window: int | None = None
    residual_bias: bool = True
    has_bias: bool = True
    chunk: int | None = None
    documents: tuple[tuple[int, ...], ...] = ()
    """Document lengths of each sequence, offset + rows in total; empty for one document each."""
    has_sinks: bool = False
    is_linear: bool = False
    has_head_map: bool = False
    seed: int = 0
    """Random seed. Rounding may move a hidden value across the kink of LeakyReLU, which changes gradients by more than
    rounding; affected cases use another seed."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value not in (None, ()))

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the operator and of the reference."""
        options = {"offset": self.offset, "window": self.window, "residual_bias": self.residual_bias}
        if self.is_linear:
            options["is_linear"] = True
        if self.documents:
            lengths = [torch.tensor(each) for each in self.documents]
            starts = torch.stack([(each.cumsum(0) - each).repeat_interleave(each) for each in lengths])
            options["document_starts"] = starts[:, self.offset : self.offset + self.rows].int()
        return options

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int | None = None) -> list[Tensor | None]:
        """Return q, k, v, bias, w1, b1, w2, b2, and sinks and a map of heads if any, rounded to a type once.

        Equal seeds give equal numbers; None selects the case's seed. The bias falls with the distance like a learned
        one, and the weights let hidden values change sign.
        """
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

        count = self.offset + self.rows
        q = normal(self.batch, self.heads, self.rows, self.dim)
        k, v = (normal(self.batch, self.heads, self.columns, self.dim) for _ in "kv")
        inputs = 2 * self.heads if self.has_bias else self.heads
        w1 = normal(self.width, inputs, 1, self.size, scale=(inputs * self.size) ** -0.5)
        w2 = normal(self.heads, self.width, 1, self.size, scale=(self.width * self.size) ** -0.5)
        b1, b2 = normal(self.width, scale=0.3), normal(self.heads, scale=0.3)
        slope = torch.rand(self.heads, 1, generator=generator) * 2
        bias = -slope * torch.log1p(torch.arange(count + 2)) + torch.randn(self.heads, count + 2, generator=generator)
        more = [torch.linspace(1, 6, self.heads, device=device)] if self.has_sinks else []
        if self.has_head_map:  # about as large as the identity
            more.append((torch.randn(self.heads, self.heads, generator=generator) / self.heads**0.5).to(device))
        return [q, k, v, bias.to(device) if self.has_bias else None, w1, b1, w2, b2, *more]


SMALL = [
    Case(2, 3, 9, 9, 8, 4, 1),
    Case(1, 4, 19, 19, 16, 20, 3),
    Case(2, 5, 11, 11, 8, 5, 3, chunk=6),
    Case(1, 4, 17, 24, 8, 33, 5, offset=3, residual_bias=False),
    Case(1, 3, 20, 20, 10, 8, 7, chunk=13),
    Case(1, 3, 18, 18, 8, 6, 3, has_bias=False),
    Case(1, 2, 17, 42, 8, 6, 5, offset=23, window=9, chunk=9),
    Case(1, 2, 19, 19, 8, 6, 7, window=2, has_bias=False),
    Case(1, 4, 3, 3, 8, 6, 7),
    Case(2, 5, 1, 31, 8, 16, 3, offset=30),
    Case(1, 17, 9, 9, 8, 8, 3),
    Case(1, 2, 14, 26, 8, 6, 5, offset=12, window=12),
    Case(1, 2, 16, 16, 8, 6, 3),
    Case(1, 3, 17, 28, 80, 8, 3, offset=11, window=13, chunk=10),
    Case(1, 2, 9, 12, 128, 6, 3, offset=3),
    Case(1, 2, 50, 50, 8, 6, 3),
    Case(1, 3, 20, 60, 8, 6, 5, offset=40, window=45, chunk=16),
    Case(2, 2, 50, 50, 8, 6, 3, documents=((50,), (3, 1, 1, 29, 16))),
    Case(2, 3, 20, 58, 8, 6, 5, offset=38, chunk=13, documents=((40, 18), (57, 1))),
    Case(1, 2, 40, 40, 8, 6, 7, window=10, chunk=30, documents=((23, 2, 15),), seed=1),
    Case(1, 2, 12, 12, 8, 6, 1, has_bias=False, documents=((5, 7),)),
    Case(2, 3, 20, 58, 8, 6, 5, offset=38, chunk=13, documents=((40, 18), (57, 1)), has_sinks=True),
    Case(1, 3, 17, 28, 80, 8, 3, offset=11, window=13, chunk=10, has_sinks=True),
]
"""For tiles of 16 rows and distances, 16 − 2p of which are kept: odd sizes, T < k, offsets, windows (some narrower than
p), chunks, decoding, H above 16; a window that ends with a tile, so that hidden values beyond it are in the next tile,
and a length with this property; a head dimension in two parts, and the largest; tiles visible to all rows, which use
separate code; documents, some shorter than k, that start within and at tiles and chunks; sinks."""

SMALL_LOSS = 2.0**-27
"""Scale of the gradients of a mean over 10⁸ numbers. It is a power of two, so that exact results are scaled exactly; in
float16 such gradients would be zero."""

SATURATED = Case(1, 3, 18, 18, 8, 6, 3)
"""Case for a bias beyond float16's range."""


def name_more(tensors: Sequence[Tensor | None]) -> list[str]:
    """Return the names of the tensors that are added to those of every call."""
    return ["sinks" if x is not None and x.dim() == 1 else "head_map" for x in tensors[len(NAMES) - 1 :]]


def takes_fields(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Convert a function of CdapeArgs to one of its fields, with the others as defaults."""

    def call(*tensors: Tensor | None, **options: Any) -> Tensor:
        if (document_starts := options.get("document_starts")) is not None:
            options["document_starts"] = document_starts.to(tensors[0].device)
        own = {name: options.pop(name) for name in ("chunk", "saturate_like") if name in options}
        count = len(NAMES) - 1
        options |= zip(name_more(tensors), tensors[count:], strict=True)
        return attend(CdapeArgs(*tensors[:count], **options), **own)

    return call


reference = takes_fields(kernel_references.cdape_attention)


def into_output(case: Case, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return a gradient of the output."""
    shape = case.batch, case.heads, case.rows, case.dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def differentiated(attend: Callable[..., Tensor], inputs: Sequence[Tensor | None], into: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    output = attend(*leaves)
    output.backward(into)
    found = [output.detach(), *(None if x is None else x.grad for x in leaves)]
    return {name: x for name, x in zip((*NAMES, *name_more(inputs)), found, strict=True) if x is not None}


def doubled(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors on the CPU in float64."""
    return [None if x is None else x.cpu().double() for x in tensors]


def truth(case: Case, inputs: Sequence[Tensor | None], into: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Return the float64 reference of these inputs, which saturates where their type does."""
    like = inputs[0].dtype
    inputs = doubled(inputs)
    attend = partial(reference, **case.options, saturate_like=like)
    return lambda: differentiated(attend, inputs, into.cpu().double())


def build_problem(rows: int, offset: int, window: int) -> CdapeProblem:
    """Build a problem without weights and tables, for tests of row positions."""
    empty = torch.empty(0)
    weights = PackedWeights(*[empty] * len(PackedWeights._fields))
    return CdapeProblem(empty, empty, weights, WeightShape(3, 4, 3, True), rows, offset, window, torch.float32)
