"""CDAPE on gates, against float64: on a GPU, or with CUDA kernels in the emulator and Triton's in its interpreter."""

import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from cdape_calls import SMALL_LOSS
from cuda_emulator import Emulator, PlantedFault, find_compiler
from kernel_references import cdape_attention
from memory_measurement import Peak
from mixer_emulation import CASES, NO_ERRORS, AllMemory, plant_fault
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
from megatron.kernels.cuda.compile import CudaKernel
from megatron.options.position import PositionOptions
from megatron.planning import attention_memory
from megatron.planning.model_costs import plan_encoding, plan_processor
from megatron.planning.row_block_memory import AttentionShape
from megatron.position.facts import AttentionDims
from megatron.position.registry import build_encoding, build_processor
from megatron.position.token_range import TokenRange
from megatron.utils.rounding import suspend_rounding
from tools.tolerances import assert_within_rounding

NAMES = ("output", "q", "k", "v", "row_bias", "key_bias", "w1", "b1", "w2", "b2", "sinks")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"  # not the fixture: an emulator cannot be rehearsed without values
COMPILED = (
    *CASES[:3],
    Geometry(16, 64, 80, torch.float16, 5),
    Geometry(16, 64, 64, torch.float16, 7),
)
"""One for each head dimension and number of taps. Heads of 64 with three taps are in bfloat16."""

pytestmark = [
    pytest.mark.skipif(not HAS_GPU and find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)"),
    pytest.mark.usefixtures("uninitialised_is_nan"),
]
only_emulated = pytest.mark.skipif(HAS_GPU, reason="kernels run on the GPU")


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
    def geometry(self) -> Geometry:
        return next(case for case in COMPILED if (case.dim, case.taps) == (self.dim, self.taps))

    @property
    def dtype(self) -> torch.dtype:
        return self.geometry.dtype

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
            return (torch.randn(*sizes, generator=generator) * scale).to(self.dtype)

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
    options = {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    weights, sinks = rest[:4], rest[4] if call.has_sinks else None
    args = CdapeArgs(q, k, v, None, *weights, sinks=sinks, **options)  # type: ignore[arg-type]
    return function(args, row_bias=row, key_bias=key)


def differentiate(
    function: Callable[..., Tensor], call: Call, inputs: list[Tensor], strength: float = 1.0
) -> dict[str, Tensor]:
    """Return the output and all gradients. `strength` is the scale of the incoming gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attend(function, call, *leaves)
    into = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(call.dtype) * strength
    output.backward(into.to(output))
    return dict(zip(NAMES, [output.detach(), *(x.grad for x in leaves)], strict=call.has_sinks))


class Unused:
    """Fallback that fails if called."""

    def __call__(self, rows: AttentionInputs) -> Tensor:
        raise AssertionError("the fallback was called")


def use_emulator(
    call: Call, monkeypatch: pytest.MonkeyPatch, fault: PlantedFault | None = None, backwards: bool = False
) -> Emulator:
    """Let the operator run its CUDA kernels in the emulator."""
    emulator = Emulator(FOLDER, fault)
    emulator.begin([AllMemory()])  # type: ignore[list-item]

    def choose_kernel(self: GatedCall, family: KernelFamily, like: Tensor) -> MixerKernel:
        return call.geometry.build_for_rows(family, is_local=self.is_local, is_gated=True)

    def launch(kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        emulator.launch(kernel, grid, arguments, backwards=backwards)

    monkeypatch.setattr(GatedCall, "choose_kernel", choose_kernel)
    monkeypatch.setattr("megatron.kernels.cdape_attention.mixer_chunks.launch_kernel", launch)
    return emulator


def run(
    call: Call,
    inputs: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    fault: PlantedFault | None = None,
    backwards: bool = False,
    strength: float = 1.0,
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Return the output, the gradients, and the counts of the emulator's errors; a GPU counts none."""
    attend_in_chunks = partial(attend_with_gates, chunk=call.chunk)
    if HAS_GPU:
        return differentiate(attend_in_chunks, call, [x.to(DEVICE) for x in inputs], strength), NO_ERRORS
    emulator = use_emulator(call, monkeypatch, fault, backwards)
    return differentiate(attend_in_chunks, call, inputs, strength), emulator.get_faults().errors


def compute_truth(call: Call, inputs: list[Tensor]) -> dict[str, Tensor]:
    return differentiate(partial(cdape_attention, saturate_like=call.dtype), call, [x.double() for x in inputs])


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
    Call(1, 12, 40, 32, dim=80, taps=5),
    Call(1, 12, 72, 17, chunk=40, window=33, documents=((3, 1, 40, 28),), taps=7, has_sinks=True),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_outputs_and_gradients_err_by_rounding_alone(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = call.draw()
    found, errors = run(call, inputs, monkeypatch)
    assert errors == NO_ERRORS
    assert_within_rounding(found, lambda: compute_truth(call, inputs), call.dtype, stored=True)


def test_sums_of_gates_cancel_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[0]
    inputs = call.draw()
    inputs[3], inputs[4] = inputs[3] - 12_345.0, inputs[4] + 12_345.0
    found, _ = run(call, inputs, monkeypatch)
    assert_within_rounding(found, lambda: compute_truth(call, inputs), call.dtype, stored=True)


@only_emulated
def test_a_bias_beyond_the_range_of_float16_does_not_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row attends to nearly one key, so true gradients vanish; errors are relative to those of smaller gates."""
    call, factor = CALLS[0], 4096
    inputs = call.draw()
    usual = {name: x.norm() for name, x in compute_truth(call, inputs).items()}
    inputs[3], inputs[4] = inputs[3] * factor, inputs[4] * factor
    assert inputs[3].min() < -2 * torch.finfo(call.dtype).max
    inputs[5][:, call.heads :] /= factor  # so that hidden values do not saturate
    usual["w1"] *= factor
    found, _ = run(call, inputs, monkeypatch)
    exact = compute_truth(call, inputs)
    # The model of rounding would round the bias to float16. The gradient of b2 is zero.
    for name in sorted({*found} - {"b2"}):
        assert (found[name].double() - exact[name]).norm() <= 4 * torch.finfo(call.dtype).eps * usual[name], name


@pytest.mark.parametrize("taps", [3, 7])
def test_terms_of_another_layout_give_the_same_bits(taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(2, 9, 40, 17, chunk=24, taps=taps, has_sinks=True)
    inputs = call.draw()
    expected, _ = run(call, inputs, monkeypatch)
    inputs[3], inputs[4] = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[3:5])
    found, _ = run(call, inputs, monkeypatch)
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_gradients_of_a_small_loss_lose_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[6]
    assert call.dtype == torch.bfloat16  # float16 needs a loss scaler
    inputs = call.draw()
    found, _ = run(call, inputs, monkeypatch)
    small, _ = run(call, inputs, monkeypatch, strength=SMALL_LOSS)
    assert [name for name in NAMES[1:] if not torch.equal(small[name], found[name] * SMALL_LOSS)] == []


@only_emulated
def test_the_order_of_warps_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[1]
    found, _ = run(call, call.draw(), monkeypatch)
    again, errors = run(call, call.draw(), monkeypatch, backwards=True)
    assert errors == NO_ERRORS
    assert all(torch.equal(found[name], again[name]) for name in found)


WINDOWED = Call(1, 12, 40, 17, dim=80, window=9, documents=((3, 37),))  # in float16: bfloat16 would hide a fault
SCORES = ", true, false>"
"""End of the name of the kernel for dS."""
FAULTS = {
    "no hidden value left of a window": (
        "Attention",
        "places.first[r] <= i32(column + G::PADDING)",
        "places.first[r] <= i32(column)",
    ),
    "a window's edge without its gradient": (
        SCORES,
        "T::is_at_edge(places, r, column) && places.row[r]",
        "T::is_at_edge(places, r, column) && places.first[r] <= i32(column) && places.row[r]",
    ),
    "a sum with exceptions": (SCORES, "select(T::is_at_edge(places, r, hidden_column + jj)", "select(false"),
    "a missing barrier": (SCORES, "    barrier(memory);\n    constexpr int COUNT", "    constexpr int COUNT"),
}


@only_emulated
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = WINDOWED if "window" in name else CALLS[0]
    fault = plant_fault(tmp_path / "cuda", *FAULTS[name])
    inputs = call.draw()
    found, errors = run(call, inputs, monkeypatch, fault)
    is_wrong = False
    try:
        assert_within_rounding(found, lambda: compute_truth(call, inputs), call.dtype, stored=True)
    except AssertionError:
        is_wrong = True
    assert is_wrong or errors != NO_ERRORS


def test_a_layer_with_forget_gates_is_that_of_the_whole_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend passes what its row blocks would compute: output and gradients err by rounding alone."""
    dims = AttentionDims(num_heads=9, head_dim=80, hidden_size=32, train_length=40, max_length=40)
    encoding = build_encoding("fox", dims, {})
    processor = build_processor("cdape", dims, {"width": 17}, has_bias=True)
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(1, 9, 40, 80, generator=generator).to(CALLS[0].dtype) for name in ("q", "k", "v")}
    inputs["gates"] = -torch.rand(1, 9, 40, generator=generator)
    inputs |= {name: x.detach() for name, x in processor.named_parameters()}
    if not HAS_GPU:
        monkeypatch.setattr(gated_op, "describe_unsupported", lambda *_: None)
        monkeypatch.setattr(gated_op, "describe_unsupported_device", lambda *_: None)
        use_emulator(CALLS[0], monkeypatch)

    def attend_with(backend: AttentionBackend, convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = {name: convert(x).requires_grad_() for name, x in inputs.items()}
        own = copy.deepcopy(processor)
        for name in dict(own.named_parameters()):
            module, _, key = name.rpartition(".")
            own.get_submodule(module)._parameters[key] = leaves[name]  # type: ignore[assignment]
        with suspend_rounding():  # sums of gates are exact in every type
            row_bias, key_bias = sum_gates(leaves["gates"], 40)
        span, (q, k, v) = TokenRange(0, 40), (leaves[name] for name in ("q", "k", "v"))
        output = backend(AttentionInputs(q, k, v, span, span, encoding, own, row_bias=row_bias, key_bias=key_bias))
        # The sum's own rounding is no part of the operator's.
        gradients = torch.autograd.grad(output.double().square().sum(), list(leaves.values()))
        return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}

    found = attend_with(TritonBackend(Unused()), lambda x: x.to(DEVICE))
    assert_within_rounding(
        found, lambda: attend_with(EagerBackend(), lambda x: x.double()), CALLS[0].dtype, stored=True
    )


def test_calls_that_the_kernels_support_are_reported_as_supported() -> None:
    supported = (torch.bfloat16, 16, 64, 32, 3, 512, 48)
    assert gated_op.describe_unsupported(*supported) is None
    assert gated_op.describe_unsupported(torch.float16, 3, 16, 4, 1, 512) is None
    for place, other, reason in (
        (0, torch.float32, "float32"),
        (1, 17, "17 heads"),
        (2, 72, "heads of 72"),
        (3, 33, "width 33"),
        (4, 9, "kernel size 9"),
        (5, 511, "multiple of 8"),
        (6, 42, "multiple of 8"),
    ):
        assert reason in (gated_op.describe_unsupported(*supported[:place], other, *supported[place + 1 :]) or "")


def test_unsupported_arguments_are_an_error() -> None:
    inputs = CALLS[0].draw()
    q, k, v, row, key, w1, *rest = inputs
    with pytest.raises(ValueError, match="row_bias"):
        attend_with_gates(CdapeArgs(q, k, v, None, w1, *rest), row[:, :-1], key)
    with pytest.raises(ValueError, match="table"):
        attend_with_gates(CdapeArgs(q, k, v, torch.zeros(9, 40), w1, *rest), row, key)
    many = (x[:1].expand(65535, *x.shape[1:]) for x in (q, k, v, row, key))
    q, k, v, row, key = many
    with pytest.raises(ValueError, match="batch times heads must be at most 65535"):
        attend_with_gates(CdapeArgs(q, k, v, None, w1, *rest), row, key)


@only_emulated
def test_memory_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts the tensors that the operator saves, and bounds what its backward pass allocates."""
    call = CALLS[1]
    assert call.chunk is not None
    use_emulator(call, monkeypatch)
    inputs = [x.requires_grad_() for x in call.draw()]
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = attend(partial(attend_with_gates, chunk=call.chunk), call, *inputs)
    for x in inputs[5:]:  # weights, which are saved anyway
        saved.pop(x.untyped_storage().data_ptr(), None)
    into = torch.ones_like(output)
    with Peak() as tracked:
        output.backward(into)
    position = PositionOptions(pos_emb="fox", score_processor="cdape")
    shape = AttentionShape(
        *(call.batch, ((0, call.rows),), call.heads, call.dim, call.dtype.itemsize, plan_encoding(position)),
        *(plan_processor(position), True, None, 64, False, 80 << 30),
    )
    monkeypatch.setattr(attention_memory, "choose_chunk_rows", lambda shape: call.chunk)
    planned = attention_memory.ATTENTION_MEMORY["triton"](shape)
    assert planned.copies_query
    assert planned.copies_keys
    copies = shape.query_bytes + 2 * shape.key_bytes
    assert sum(saved.values()) == pytest.approx(planned.saved_bytes + copies, rel=0.03)
    assert tracked.most <= planned.workspace_bytes <= 1.3 * tracked.most
