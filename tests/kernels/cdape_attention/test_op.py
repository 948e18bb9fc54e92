"""The operator in Triton's interpreter (or on a GPU), compared with float64: outputs, gradients, PyTorch integration.

New memory is filled with NaN, and operations without a deterministic algorithm raise errors.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cdape_calls import (
    NAMES,
    SATURATED,
    SMALL,
    SMALL_LOSS,
    Case,
    differentiated,
    doubled,
    into_output,
    reference,
    takes_fields,
    truth,
)
from kernel_types import pair_with_types
from memory_measurement import Peak
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import interpreter_builder

from megatron.kernels.cdape_attention import driver, head_products, op, triton_mixer
from megatron.kernels.cdape_attention.configs import count_map_bytes
from megatron.kernels.runtime import is_interpreted
from tools.tolerances import SAFETY_FACTOR, assert_within_rounding, compute_error_ratio

TINY = Case(1, 2, 5, 5, 4, 3, 3)

cdape_attention = takes_fields(op.cdape_attention)
pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")


def _assert_rounding_alone(
    case: Case,
    dtype: torch.dtype,
    device: str,
    change: Callable[[list[Tensor | None]], None] = lambda inputs: None,
    strength: float = 1.0,
) -> dict[str, Tensor]:
    """Assert that errors of the operator are rounding errors, and return its results.

    PyTorch's products of q, k and v pass through memory.

    Args:
        change: modifies the inputs in place.
        strength: scale of the incoming gradient.
    """
    inputs, into = case.inputs(dtype, device), into_output(case, dtype, device) * strength
    change(inputs)
    found = differentiated(partial(cdape_attention, **case.options, chunk=case.chunk), inputs, into)
    assert_within_rounding(found, truth(case, inputs, into), dtype, stored=True)
    return found


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize(("case", "dtype"), pair_with_types(SMALL), ids=str)
def test_outputs_and_gradients_err_by_rounding_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    found = _assert_rounding_alone(case, dtype, device)
    assert case.has_sinks or (found["b2"] == 0).all()


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_a_small_loss_lose_no_bit(dtype: torch.dtype, device: str) -> None:
    case = SMALL[2]
    inputs, into = case.inputs(dtype, device), into_output(case, dtype, device)
    attend = partial(cdape_attention, **case.options, chunk=case.chunk)
    found, small = (differentiated(attend, inputs, into * strength) for strength in (1.0, SMALL_LOSS))
    assert [name for name in NAMES[1:] if not torch.equal(small[name], found[name] * SMALL_LOSS)] == []


FAULTS: dict[str, Callable[[Case, list[Tensor | None], Tensor], dict[str, Tensor]]] = {
    "q lacks the processor's part": lambda case, inputs, into: truth(
        case, [x * 0 if name == "w2" else x for name, x in zip(NAMES[1:], inputs, strict=True)], into
    )(),
    "output sees a hidden value too few": lambda case, inputs, into: truth(
        replace(case, window=case.columns - 1), inputs, into
    )(),
    "w1 lacks a chunk of rows": lambda case, inputs, into: truth(
        case, inputs, torch.cat([into[:, :, :-2], 0 * into[:, :, -2:]], dim=2)
    )(),
    "b1 is NaN": lambda case, inputs, into: {"b1": truth(case, inputs, into)()["b1"] * float("nan")},
    "bias is not joined to the logits": lambda case, inputs, into: truth(
        replace(case, residual_bias=False), inputs, into
    )(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_more_than_rounding(fault: str, dtype: torch.dtype) -> None:
    """Faults that a larger tolerance would hide are detected."""
    case = replace(SMALL[1], rows=15, columns=15)
    inputs, into = case.inputs(dtype), into_output(case, dtype)
    name = fault.split()[0]
    found = truth(case, inputs, into)() | {name: FAULTS[fault](case, inputs, into)[name]}
    ratios = compute_error_ratio(found, truth(case, inputs, into), dtype, stored=True)
    assert [wrong for wrong, ratio in ratios.items() if ratio > SAFETY_FACTOR] == [name]


def test_with_the_tiles_that_are_shipped_and_bitwise_repeatable(device: str) -> None:
    case = Case(1, 4, 7, 34, 8, 6, 3, offset=27, chunk=5)
    first = _assert_rounding_alone(case, torch.float32, device)
    inputs, into = case.inputs(torch.float32, device), into_output(case, torch.float32, device)
    second = differentiated(partial(cdape_attention, **case.options, chunk=case.chunk), inputs, into)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("residual", [True, False])
def test_a_bias_beyond_float16_saturates(residual: bool, device: str) -> None:
    case = replace(SATURATED, residual_bias=residual)

    def saturating(inputs: list[Tensor | None]) -> None:
        """Make hidden values exceed the type's range while logits stay moderate."""
        inputs[3], inputs[4], inputs[6] = inputs[3] * 1e6, inputs[4] * 3, inputs[6] * 1e-4

    # A weight's gradient contains hidden values of 65,504; a smaller incoming gradient keeps it within float16.
    _assert_rounding_alone(case, torch.float16, device, saturating, strength=2.0**-5)


@pytest.mark.usefixtures("tall_tiles")
def test_the_second_convolution_saturates_at_float16_too(device: str) -> None:
    """The second convolution saturates at float16 too: if all its values do, only the scores differ."""
    inputs = SATURATED.inputs(torch.float16, device)
    inputs[3], inputs[4], inputs[6] = inputs[3].abs() * 1e6, inputs[4].abs(), inputs[6].abs()
    exact, options = doubled(inputs), {"residual_bias": False}
    found = {"output": cdape_attention(*inputs, **options)}
    assert_within_rounding(
        found,
        lambda: {"output": reference(*exact, **options, saturate_like=torch.float16)},
        torch.float16,
        stored=True,
    )


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("window", [None, 7])
def test_a_decoding_step_equals_its_row_of_the_whole(window: int | None, device: str) -> None:
    case = Case(2, 3, 20, 20, 8, 6, 5, window=window)
    q, k, v, *rest = case.inputs(torch.float32, device)
    exact = doubled(case.inputs(torch.float32))
    for row in (0, 1, 4, 19):
        step = q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1]
        found = {"output": cdape_attention(*step, *rest, offset=row, window=window)[:, :, 0]}
        assert_within_rounding(
            found, lambda row=row: {"output": reference(*exact, window=window)[:, :, row]}, torch.float32
        )


@pytest.mark.usefixtures("tall_tiles")
def test_a_windowed_cache_may_drop_unused_columns(device: str) -> None:
    case, window = Case(1, 2, 24, 24, 8, 6, 5, window=6), 6
    q, k, v, *rest = case.inputs(torch.float32, device)
    exact = doubled(case.inputs(torch.float32))
    left = 20 - window + 1 - 2
    found = cdape_attention(q[:, :, 20:], k[:, :, left:], v[:, :, left:], *rest, offset=20 - left, window=window)
    assert_within_rounding(
        {"output": found}, lambda: {"output": reference(*exact, window=window)[:, :, 20:]}, torch.float32
    )


@pytest.mark.usefixtures("tall_tiles")
def test_no_row_reads_a_later_key(device: str) -> None:
    case = replace(TINY, size=7, rows=9, columns=9)
    q, k, v, *rest = case.inputs(torch.float32, device)
    longer = [torch.cat([x, torch.full_like(x, float("nan"))], dim=2) for x in (k, v)]
    assert torch.equal(cdape_attention(q, k, v, *rest), cdape_attention(q, *longer, *rest))


@pytest.mark.usefixtures("tall_tiles")
def test_the_gradient_of_a_bias_that_is_only_added_sums_to_zero(device: str) -> None:
    inputs, into = TINY.inputs(torch.float32, device), into_output(TINY, torch.float32, device)
    inputs[6] = torch.zeros_like(inputs[6])  # hidden values have no effect
    exact = truth(TINY, inputs, into)
    found = differentiated(cdape_attention, inputs, into)["bias"]
    assert found.abs().max() > 1e-3
    assert exact()["bias"].sum(1).abs().max() < 1e-14
    assert_within_rounding({"sum": found.double().sum(1)}, lambda: {"sum": exact()["bias"].sum(1)}, torch.float32)


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("order", [(2, 0, 1, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
def test_inputs_and_gradients_need_not_be_contiguous(order: tuple[int, ...], device: str) -> None:
    q, k, v, *rest = TINY.inputs(torch.float32, device)
    into = into_output(TINY, torch.float32, device)
    back = [order.index(i) for i in range(4)]
    *strided, strided_into = (x.permute(order).contiguous().permute(back) for x in (q, k, v, into))
    assert not strided[0].is_contiguous()
    expected = differentiated(cdape_attention, [q, k, v, *rest], into)
    found = differentiated(cdape_attention, [*strided, *rest], strided_into)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("tall_tiles")
def test_the_output_is_laid_out_as_activations(device: str) -> None:
    assert cdape_attention(*TINY.inputs(torch.float32, device)).permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.usefixtures("tall_tiles")
def test_scale_multiplies_the_products(device: str) -> None:
    found = {"output": cdape_attention(*TINY.inputs(torch.float32, device), scale=1.0)}
    exact = doubled(TINY.inputs(torch.float32))
    assert_within_rounding(found, lambda: {"output": reference(*exact, scale=1.0)}, torch.float32)


@pytest.mark.usefixtures("tall_tiles")
def test_torch_compile_and_checkpointing_change_nothing(device: str) -> None:
    inputs, into = TINY.inputs(torch.float32, device), into_output(TINY, torch.float32, device)
    plain = differentiated(cdape_attention, inputs, into)
    compile_kernel = differentiated(torch.compile(cdape_attention, backend="aot_eager"), inputs, into)
    again = differentiated(partial(checkpoint, cdape_attention, use_reentrant=False), inputs, into)
    # The compiler differentiates the code around the operator in another order.
    assert_within_rounding(compile_kernel, truth(TINY, inputs, into), torch.float32)
    for name, expected in plain.items():
        assert torch.equal(again[name], expected), name


@pytest.mark.usefixtures("tall_tiles")
def test_saved_memory_is_linear_in_the_length(device: str) -> None:
    def kept(length: int) -> int:
        sizes: list[int] = []
        case = replace(TINY, rows=length, columns=length)
        leaves = [x.requires_grad_() for x in case.inputs(torch.float32, device)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            cdape_attention(*leaves)
        return sum(sizes)

    assert kept(32) < 2.1 * kept(16)


@pytest.mark.parametrize("name", ["w1", "b1", "w2"])
@pytest.mark.usefixtures("tall_tiles")
def test_a_weight_that_is_not_a_number_shows_in_the_output(name: str, dtype: torch.dtype, device: str) -> None:
    """In float16, hidden values are clamped, and on a GPU the smaller of NaN and a number is the number."""
    arguments = dict(zip(NAMES[1:], (x.clone() for x in TINY.inputs(dtype, device)), strict=True))
    arguments[name].view(-1)[0] = float("nan")
    assert cdape_attention(**arguments).isnan().any()


WRONG = [
    ({"offset": 1}, "offset is 1 with 5 rows and 5 columns"),
    ({"offset": -1}, "offset is -1"),
    ({"window": 0}, "window is 0"),
    ({"chunk": 0}, "chunk is 0"),
    ({"bias": torch.zeros(2, 4)}, r"bias is \[2, 4\]; it must be \[2, N\] with N ≥ offset \+ R = 5"),
    ({"bias": torch.zeros(2, 9, dtype=torch.bfloat16)}, "bias is torch.bfloat16"),
    ({"bias": None}, r"w1 is \[3, 4, 1, 3\]; it must be \[D, 2, 1, k\]"),
    ({"w1": torch.zeros(65, 4, 1, 3), "b1": torch.zeros(65), "w2": torch.zeros(2, 65, 1, 3)}, "D must be from 1 to 64"),
    ({"w1": torch.zeros(3, 4, 1, 2)}, "k odd"),
    ({"w2": torch.zeros(2, 3, 1, 5)}, r"they must be \[3\], \[2, 3, 1, 3\] and \[2\]"),
    ({"k": torch.zeros(1, 3, 5, 4)}, r"here \[1, 2, C, 4\]"),
    ({"q": torch.zeros(1, 2, 5, 4, dtype=torch.float64)}, "q, k and v are torch.float64"),
    ({"q": torch.zeros(1, 2, 0, 4)}, "no size may be 0"),
    ({"q": torch.zeros(2, 5, 4)}, r"q is \[2, 5, 4\]"),
    (dict.fromkeys("qkv", torch.zeros(1, 2, 5, 129)), "head dimension 129; it must be at most 128"),
    (
        dict.fromkeys("qkv", torch.zeros(1, 2, 5, 4).expand(32768, -1, -1, -1)),
        "batch times heads must be at most 65535",
    ),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_invalid_arguments_are_rejected_by_name(changed: dict[str, object], message: str, device: str) -> None:
    changed = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in changed.items()}
    arguments = dict(zip(NAMES[1:], TINY.inputs(torch.float32, device), strict=True)) | changed
    with pytest.raises(ValueError, match=message):
        cdape_attention(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_cpu_without_the_interpreter_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="this kernel needs a CUDA device, its tensors are on cpu"):
        cdape_attention(*TINY.inputs(torch.float32))


@pytest.mark.skipif(not is_interpreted(), reason="products are counted in Triton's interpreter")
@pytest.mark.usefixtures("tall_tiles")
def test_tiles_of_other_documents_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel computes only the matrix products of the separate documents, in both passes."""
    products: Counter[str] = Counter()
    running: list[str] = []
    launch, create_dot = triton_mixer.launch, interpreter_builder.create_dot

    def count_dot(*args: object) -> object:
        products[running[-1]] += 1
        return create_dot(*args)

    def record_launch(kernel: object, *args: object) -> object:
        running.append(kernel.__name__)
        return launch(kernel, *args)

    for module in (head_products, triton_mixer):
        monkeypatch.setattr(module, "launch", record_launch)
    monkeypatch.setattr(interpreter_builder, "create_dot", count_dot)

    def count(lengths: tuple[int, ...], documents: tuple[tuple[int, ...], ...] = ()) -> Counter[str]:
        products.clear()
        for length in lengths:
            case = Case(1, 2, length, length, 8, 6, 3, documents=documents)
            inputs = case.inputs(torch.float32)
            differentiated(partial(cdape_attention, **case.options), inputs, into_output(case, torch.float32))
        return products.copy()

    lengths = (32, 16, 48)
    together, alone = count((sum(lengths),), (lengths,)), count(lengths)
    assert len(alone) == 8
    assert together == alone
    assert all(number > 1.5 * together[kernel] for kernel, number in count((sum(lengths),)).items())


@pytest.mark.skipif(not is_interpreted(), reason="memory is measured on a CPU")
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("has_map", [False, True])
def test_logits_are_freed_before_the_gradient_of_scores_is_allocated(
    has_map: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maps of the backward pass fit in the memory by which a chunk's rows are chosen."""

    def collect_first(*args: Any) -> tuple[Tensor, Tensor]:
        gc.collect()  # the interpreter's frames are reference cycles
        return triton_mixer.differentiate_weights(*args)

    monkeypatch.setattr(driver, "differentiate_weights", collect_first)
    length = 128
    case = Case(1, 8, length, length, 8, 8, 1, is_linear=has_map, has_head_map=has_map)
    inputs = [None if x is None else x.requires_grad_() for x in case.inputs(torch.bfloat16)]
    output = cdape_attention(*inputs, **case.options)
    into = torch.ones_like(output)
    with Peak() as tracked:
        output.backward(into)
    # A map of heads has the gradient of its results beside the others.
    maps = length * length * (count_map_bytes(8, torch.bfloat16) + has_map * 8 * 2)
    assert maps <= tracked.most <= maps + 0.75 * (8 * 2 * length * length)  # less than one map more


@pytest.mark.skipif(not is_interpreted(), reason="the constants do not depend on the device")
@pytest.mark.parametrize(("length", "is_wide"), [(48, True), (40, False)])
def test_maps_of_a_multiple_of_16_columns_are_stored_by_eight_heads(
    length: int, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, build = [], triton_mixer.build_heads_constants
    monkeypatch.setattr(triton_mixer, "build_heads_constants", lambda *args: (found.append(args[-1]), build(*args))[1])
    case = Case(1, 8, length, length, 8, 8, 1)
    inputs = [None if x is None else x.requires_grad_() for x in case.inputs(torch.bfloat16)]
    cdape_attention(*inputs, **case.options).sum().backward()
    assert found == [True, True, is_wide]  # scores in both passes, then P and dL
