"""CDAPE on gates: the operator with its CUDA kernels in the emulator and the softmax in Triton's interpreter."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from mixer_emulation import CASES, NO_ERRORS
from mixer_emulation import Case as Geometry
from torch import Tensor

from megatron.kernels.cdape_attention import gated_op
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.gated_op import GatedCall, attend_with_gates, describe_unsupported
from megatron.kernels.cdape_attention.geometry import FOLDER, KernelFamily, MixerKernel
from megatron.kernels.cdape_attention.reference import reference
from megatron.kernels.cuda.emulate import Emulator, find_compiler
from megatron.kernels.cuda.kernel import CudaKernel
from tools.rounding import assert_within_rounding

NAMES = ("output", "q", "k", "v", "row_bias", "key_bias", "w1", "b1", "w2", "b2")
DTYPE = torch.float16  # of Triton's interpreter
COMPILED = (CASES[1], Geometry(32, 32, 64, DTYPE))

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)"),
    pytest.mark.usefixtures("uninitialised_is_nan"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU"),
]


class AllMemory:
    """Everything that a process may access, as an array that kernels may access."""

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return 1 << 60

    def element_size(self) -> int:
        return 1


@dataclass(frozen=True)
class Call:
    batch: int
    heads: int
    rows: int
    width: int
    dim: int = 64
    offset: int = 0
    chunk: int | None = None
    documents: tuple[tuple[int, ...], ...] = ()
    residual_bias: bool = True
    forgetting: float = 1.0

    @property
    def columns(self) -> int:
        return self.offset + self.rows

    @property
    def options(self) -> dict[str, object]:
        options: dict[str, object] = {"offset": self.offset, "residual_bias": self.residual_bias}
        if self.documents:
            lengths = [torch.tensor(each) for each in self.documents]
            starts = torch.stack([(each.cumsum(0) - each).repeat_interleave(each) for each in lengths])
            options["document_starts"] = starts[:, self.offset :].int()
        return options

    def draw(self) -> list[Tensor]:
        """Return q, k, v, both biases, w1, b1, w2 and b2. Gates of the first heads forget within a few tokens."""
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, generator=generator) * scale).to(DTYPE)

        batch, heads, columns, width = self.batch, self.heads, self.columns, self.width
        gates = -torch.nn.functional.softplus(torch.randn(batch, heads, columns, generator=generator).double())
        sums = (gates * torch.linspace(self.forgetting, 0.02, heads)[:, None]).cumsum(2)
        return [
            normal(batch, heads, self.rows, self.dim),
            *(normal(batch, heads, columns, self.dim) for _ in "kv"),
            *(sums[..., self.offset :], -sums),
            normal(width, 2 * heads, 1, 3, scale=(6 * heads) ** -0.5),
            normal(width, scale=0.3),
            normal(heads, width, 1, 3, scale=(3 * width) ** -0.5),
            normal(heads, scale=0.3),
        ]


def attend(
    function: Callable[..., Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, row: Tensor, key: Tensor, *rest: Tensor
) -> Tensor:
    args = CdapeArgs(q, k, v, None, *rest, **call.options)  # type: ignore[arg-type]
    return function(args, row_bias=row, key_bias=key)


def differentiate(function: Callable[..., Tensor], call: Call, inputs: list[Tensor]) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attend(function, call, *leaves)
    into = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    output.backward(into.to(output.dtype))
    return dict(zip(NAMES, [output.detach(), *(x.grad for x in leaves)], strict=True))


def run(
    call: Call, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch, folder: Path = FOLDER, backwards: bool = False
) -> tuple[dict[str, Tensor], Emulator]:
    emulator = Emulator(folder)
    emulator.begin([AllMemory()])  # type: ignore[list-item]
    compiled = next(case for case in COMPILED if case.dim == call.dim)

    def choose_kernel(self: GatedCall, family: KernelFamily, like: Tensor) -> MixerKernel:
        is_local = self.problem.document_starts is not None
        return compiled.build_for_rows(family, is_local=is_local, is_gated=True)

    def launch(kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        emulator.launch(kernel, grid, arguments, backwards=backwards)

    monkeypatch.setattr(GatedCall, "choose_kernel", choose_kernel)
    monkeypatch.setattr(gated_op, "launch_kernel", launch)
    monkeypatch.setattr("megatron.kernels.cdape_attention.driver.launch_kernel", launch)
    return differentiate(partial(attend_with_gates, chunk=call.chunk), call, inputs), emulator


def compute_truth(call: Call, inputs: list[Tensor]) -> dict[str, Tensor]:
    return differentiate(partial(reference, saturate_like=DTYPE), call, [x.double() for x in inputs])


CALLS = [
    Call(2, 9, 40, 17, dim=80),
    Call(1, 16, 72, 32, dim=80, chunk=24),
    Call(1, 9, 32, 17, dim=80, offset=48, chunk=16, residual_bias=False),
    Call(2, 9, 40, 17, dim=80, chunk=24, documents=((40,), (3, 1, 20, 16))),
    Call(1, 12, 96, 32),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_outputs_and_gradients_err_by_rounding_alone(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = call.draw()
    found, emulator = run(call, inputs, monkeypatch)
    assert emulator.get_faults().errors == NO_ERRORS
    assert_within_rounding(found, lambda: compute_truth(call, inputs), DTYPE, stored=True)
