"""CDAPE on gates: the operator with its CUDA kernels in the emulator and the softmax in Triton's interpreter."""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from mixer_emulation import CASES, NO_ERRORS, AllMemory
from mixer_emulation import Case as Geometry
from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend
from megatron.attention.backends.pytorch import EagerBackend
from megatron.attention.backends.triton import TritonBackend
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import sum_gates
from megatron.kernels.cdape_attention import gated_op
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.gated_op import GatedCall, attend_with_gates
from megatron.kernels.cdape_attention.geometry import FOLDER, KernelFamily, MixerKernel
from megatron.kernels.cdape_attention.reference import reference
from megatron.kernels.cuda.compile import CudaKernel
from megatron.kernels.cuda.emulate import Emulator, find_compiler
from megatron.position.facts import AttentionDims
from megatron.position.registry import build_encoding, build_processor
from megatron.position.token_range import TokenRange
from tools.rounding import assert_within_rounding

NAMES = ("output", "q", "k", "v", "row_bias", "key_bias", "w1", "b1", "w2", "b2", "sinks")
DTYPE = torch.float16  # of Triton's interpreter
COMPILED = (CASES[1], CASES[2], Geometry(32, 32, 64, DTYPE))

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)"),
    pytest.mark.usefixtures("uninitialised_is_nan"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU"),
]


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
    taps: int = 3
    window: int | None = None
    has_sinks: bool = False

    @property
    def columns(self) -> int:
        return self.offset + self.rows

    @property
    def options(self) -> dict[str, object]:
        options: dict[str, object] = {
            "offset": self.offset,
            "window": self.window,
            "residual_bias": self.residual_bias,
        }
        if self.documents:
            lengths = [torch.tensor(each) for each in self.documents]
            starts = torch.stack([(each.cumsum(0) - each).repeat_interleave(each) for each in lengths])
            options["document_starts"] = starts[:, self.offset :].int()
        return options

    def draw(self) -> list[Tensor]:
        """Return q, k, v, both biases, w1, b1, w2, b2 and sinks. Gates of the first heads forget in a few tokens."""
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, generator=generator) * scale).to(DTYPE)

        batch, heads, columns, width = self.batch, self.heads, self.columns, self.width
        gates = -torch.nn.functional.softplus(torch.randn(batch, heads, columns, generator=generator).double())
        sums = (gates * torch.linspace(1.0, 0.02, heads)[:, None]).cumsum(2)
        return [
            normal(batch, heads, self.rows, self.dim),
            *(normal(batch, heads, columns, self.dim) for _ in "kv"),
            *(sums[..., self.offset :], -sums),
            normal(width, 2 * heads, 1, self.taps, scale=(2 * self.taps * heads) ** -0.5),
            normal(width, scale=0.3),
            normal(heads, width, 1, self.taps, scale=(self.taps * width) ** -0.5),
            normal(heads, scale=0.3),
            *([torch.randn(heads, generator=generator)] if self.has_sinks else []),
        ]


def attend(
    function: Callable[..., Tensor],
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Tensor,
    key: Tensor,
    *rest: Tensor,
) -> Tensor:
    weights, sinks = rest[:4], rest[4] if call.has_sinks else None
    args = CdapeArgs(q, k, v, None, *weights, sinks=sinks, **call.options)  # type: ignore[arg-type]
    return function(args, row_bias=row, key_bias=key)


def differentiate(function: Callable[..., Tensor], call: Call, inputs: list[Tensor]) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attend(function, call, *leaves)
    into = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    output.backward(into.to(output.dtype))
    return dict(zip(NAMES, [output.detach(), *(x.grad for x in leaves)], strict=call.has_sinks))


class Unused:
    """Fallback that fails if called."""

    def __call__(self, rows: AttentionInputs) -> Tensor:
        raise AssertionError("the kernels are left")


def use_emulator(
    call: Call, monkeypatch: pytest.MonkeyPatch, folder: Path = FOLDER, backwards: bool = False
) -> Emulator:
    """Let the operator run its CUDA kernels in the emulator."""
    emulator = Emulator(folder)
    emulator.begin([AllMemory()])  # type: ignore[list-item]
    compiled = next(case for case in COMPILED if (case.dim, case.taps) == (call.dim, call.taps))

    def choose_kernel(self: GatedCall, family: KernelFamily, like: Tensor) -> MixerKernel:
        return compiled.build_for_rows(family, is_local=self.is_local, is_gated=True)

    def launch(kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        emulator.launch(kernel, grid, arguments, backwards=backwards)

    monkeypatch.setattr(GatedCall, "choose_kernel", choose_kernel)
    monkeypatch.setattr(gated_op, "launch_kernel", launch)
    monkeypatch.setattr("megatron.kernels.cdape_attention.driver.launch_kernel", launch)
    return emulator


def run(
    call: Call, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch, folder: Path = FOLDER, backwards: bool = False
) -> tuple[dict[str, Tensor], Emulator]:
    emulator = use_emulator(call, monkeypatch, folder, backwards)
    return differentiate(partial(attend_with_gates, chunk=call.chunk), call, inputs), emulator


def compute_truth(call: Call, inputs: list[Tensor]) -> dict[str, Tensor]:
    return differentiate(partial(reference, saturate_like=DTYPE), call, [x.double() for x in inputs])


CALLS = [
    Call(2, 9, 40, 17, dim=80),
    Call(1, 16, 72, 32, dim=80, chunk=24),
    Call(1, 9, 32, 17, dim=80, offset=48, chunk=16, residual_bias=False),
    Call(2, 12, 72, 17, chunk=40, documents=((72,), (3, 1, 40, 28))),
    Call(1, 9, 40, 17, dim=80, chunk=24, documents=((3, 1, 30, 6),), taps=1),
    Call(1, 12, 40, 32, dim=80, taps=1, has_sinks=True),
    Call(1, 12, 72, 17, offset=48, chunk=40, window=33, has_sinks=True),
    Call(2, 12, 72, 17, chunk=40, window=7, documents=((72,), (3, 1, 40, 28)), residual_bias=False, has_sinks=True),
    Call(1, 9, 40, 17, dim=80, window=1, chunk=24, taps=1),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_outputs_and_gradients_err_by_rounding_alone(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = call.draw()
    found, emulator = run(call, inputs, monkeypatch)
    assert emulator.get_faults().errors == NO_ERRORS
    assert_within_rounding(found, lambda: compute_truth(call, inputs), DTYPE, stored=True)


def test_sums_of_gates_cancel_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[0]
    inputs = call.draw()
    inputs[3], inputs[4] = inputs[3] - 12_345.0, inputs[4] + 12_345.0
    found, _ = run(call, inputs, monkeypatch)
    assert_within_rounding(found, lambda: compute_truth(call, inputs), DTYPE, stored=True)


def test_a_bias_beyond_the_range_of_float16_does_not_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[0]
    inputs = call.draw()
    inputs[3], inputs[4] = inputs[3] * 4096, inputs[4] * 4096
    assert inputs[3].min() < -2 * torch.finfo(DTYPE).max
    inputs[5][:, call.heads :] /= 4096  # so that hidden values do not saturate
    found, _ = run(call, inputs, monkeypatch)
    exact = compute_truth(call, inputs)
    # The model of rounding would round the bias to float16. The other two gradients cancel.
    for name in sorted({*found} - {"row_bias", "b2"}):
        error = (found[name].double() - exact[name]).norm() / exact[name].norm()
        assert error <= 4 * torch.finfo(DTYPE).eps, name


def test_the_order_of_warps_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[1]
    found, _ = run(call, call.draw(), monkeypatch)
    again, emulator = run(call, call.draw(), monkeypatch, backwards=True)
    assert emulator.get_faults().errors == NO_ERRORS
    assert all(torch.equal(found[name], again[name]) for name in found)


WINDOWED = Call(1, 12, 40, 17, window=9, documents=((3, 37),))
FAULTS = {
    "no hidden value left of a window": (
        "tables.h",
        "places.first[r] <= i32(column + G::PADDING)",
        "places.first[r] <= i32(column)",
    ),
    "a window's edge without its gradient": (
        "mixer_backward.h",
        "T::is_at_edge(places, r, column) && places.row[r]",
        "T::is_at_edge(places, r, column) && places.first[r] <= i32(column) && places.row[r]",
    ),
    "a sum with exceptions": (
        "mixer_backward.h",
        "select(T::is_at_edge(places, r, hidden_column + jj)",
        "select(false",
    ),
    "a missing barrier": ("gates.h", "    barrier(memory);\n    constexpr", "    constexpr"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = WINDOWED if "window" in name else CALLS[0]
    folder = tmp_path / "cuda"
    shutil.copytree(FOLDER, folder)
    header, right, wrong = FAULTS[name]
    source = (folder / header).read_text(encoding="utf-8")
    assert source.count(right) == 1
    (folder / header).write_text(source.replace(right, wrong), encoding="utf-8")
    inputs = call.draw()
    found, emulator = run(call, inputs, monkeypatch, folder)
    is_wrong = False
    try:
        assert_within_rounding(found, lambda: compute_truth(call, inputs), DTYPE, stored=True)
    except AssertionError:
        is_wrong = True
    assert is_wrong or emulator.get_faults().errors != NO_ERRORS


def test_a_layer_with_forget_gates_is_that_of_the_whole_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend passes what its row blocks would compute: output and gradients agree within half precision."""
    dims = AttentionDims(num_heads=9, head_dim=80, hidden_size=32, train_length=40, max_length=40)
    encoding = build_encoding("fox", dims, {})
    processor = build_processor("cdape", dims, {"width": 17}, has_bias=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 40, 80, generator=generator).to(DTYPE) for _ in range(3))
    gates = -torch.rand(1, 9, 40, generator=generator)
    monkeypatch.setattr(gated_op, "describe_unsupported", lambda *_: None)
    monkeypatch.setattr(gated_op, "describe_unfit_device", lambda *_: None)

    def attend_with(backend: AttentionBackend, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)] + [gates.clone().requires_grad_()]
        row_bias, key_bias = sum_gates(leaves[3], 40)
        span = TokenRange(0, 40)
        inputs = AttentionInputs(*leaves[:3], span, span, encoding, processor, row_bias=row_bias, key_bias=key_bias)
        output = backend(inputs)
        wanted = [*leaves, *processor.parameters()]
        return [output, *torch.autograd.grad(output.float().square().sum(), wanted, allow_unused=True)]

    use_emulator(CALLS[0], monkeypatch)
    found = attend_with(TritonBackend(Unused()), DTYPE)
    for ours, exact in zip(found, attend_with(EagerBackend(), torch.float32), strict=True):
        if exact is None:
            continue
        assert (ours.float() - exact).norm() <= 0.02 * exact.norm() + 1e-3


def test_support_is_stated_for_calls_that_the_kernels_take() -> None:
    taken = (torch.bfloat16, 16, 64, 32, 3, 512, 48)
    assert gated_op.describe_unsupported(*taken) is None
    assert gated_op.describe_unsupported(torch.float16, 3, 16, 4, 1, 512) is None
    for place, other, reason in (
        (0, torch.float32, "float32"),
        (1, 17, "17 heads"),
        (2, 72, "heads of 72"),
        (3, 33, "width 33"),
        (4, 5, "kernel size 5"),
        (5, 511, "multiple of 8"),
        (6, 42, "multiple of 8"),
    ):
        assert reason in (gated_op.describe_unsupported(*taken[:place], other, *taken[place + 1 :]) or "")


def test_what_the_operator_does_not_take_is_an_error() -> None:
    inputs = CALLS[0].draw()
    q, k, v, row, key, w1, *rest = inputs
    with pytest.raises(ValueError, match="row_bias"):
        attend_with_gates(CdapeArgs(q, k, v, None, w1, *rest), row[:, :-1], key)
    with pytest.raises(ValueError, match="table"):
        attend_with_gates(CdapeArgs(q, k, v, torch.zeros(9, 40), w1, *rest), row, key)
