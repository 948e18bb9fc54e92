"""Linear maps between the heads before and after the softmax (talking heads), compared with float64.

`is_linear` omits the activation, so that Conv2 of the scores is a linear map; `head_map` maps the attention weights.
New memory is filled with NaN.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from cdape_calls import Case, differentiated, doubled, into_output, reference, takes_fields, truth
from kernel_types import pair_with_types
from torch import Tensor

from megatron.kernels.cdape_attention import op
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.cpu import cdape_attention as attend_on_cpu
from megatron.kernels.cdape_attention.gated_op import attend_with_gates
from tools.tolerances import SAFETY_FACTOR, assert_within_rounding, compute_error_ratio

cdape_attention = takes_fields(op.cdape_attention)
pytestmark = pytest.mark.usefixtures("uninitialised_is_nan")

CASES = [
    replace(case, is_linear=True, has_head_map=True)
    for case in (
        Case(2, 3, 9, 9, 8, 3, 1),
        Case(1, 8, 19, 19, 16, 8, 1),
        Case(2, 12, 11, 11, 8, 12, 1, chunk=6),
        Case(1, 16, 17, 24, 8, 16, 1, offset=3),
        Case(1, 17, 20, 20, 10, 17, 1, chunk=13),
        Case(1, 3, 18, 18, 8, 3, 1, has_bias=False),
        Case(1, 2, 17, 42, 80, 2, 1, offset=23, window=9, chunk=9),
        Case(2, 2, 12, 150, 8, 2, 1, offset=138, documents=((150,), (3, 1, 1, 141, 4)), chunk=7),
        Case(2, 3, 20, 58, 8, 3, 1, offset=38, chunk=13, documents=((40, 18), (57, 1)), has_sinks=True),
        Case(1, 3, 17, 28, 80, 3, 1, offset=11, window=13, chunk=10, has_sinks=True),
    )
]
"""Heads below, at and above a product's 16; chunks, offsets, windows, documents that begin within and at a block of
columns, sinks, a head dimension in two parts, and rows of more than one block."""


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize(("case", "dtype"), pair_with_types(CASES), ids=str)
def test_maps_of_heads_err_by_rounding_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs, into = case.inputs(dtype, device), into_output(case, dtype, device)
    found = differentiated(partial(cdape_attention, **case.options, chunk=case.chunk), inputs, into)
    assert_within_rounding(found, truth(case, inputs, into), dtype, stored=True)


def test_a_map_of_zeros_is_no_map(device: str) -> None:
    case = CASES[0]
    inputs, into = case.inputs(torch.float32, device), into_output(case, torch.float32, device)
    inputs[-1] = torch.zeros_like(inputs[-1])
    found = differentiated(partial(cdape_attention, **case.options), inputs, into)
    assert found.pop("head_map").abs().max() > 0.1
    plain, exact = partial(reference, **case.options), doubled(inputs[:-1])
    assert_within_rounding(found, lambda: differentiated(plain, exact, into.cpu().double()), torch.float32, stored=True)


def test_scores_of_zero_have_the_gradient_of_a_linear_map(device: str) -> None:
    case = CASES[0]
    inputs, into = case.inputs(torch.float32, device), into_output(case, torch.float32, device)
    inputs[0] = torch.zeros_like(inputs[0])
    found = differentiated(partial(cdape_attention, **case.options), inputs, into)
    assert_within_rounding(found, truth(case, inputs, into), torch.float32, stored=True)


FAULTS: dict[str, Callable[[Case, list[Tensor]], tuple[Case, list[Tensor]]]] = {
    "the map is transposed": lambda case, inputs: (case, [*inputs[:-1], inputs[-1].mT.contiguous()]),
    "a head is not mapped": lambda case, inputs: (
        case,
        [*inputs[:-1], inputs[-1] * (torch.arange(case.heads) < case.heads - 1)[:, None]],
    ),
    "a row sees a column too few": lambda case, inputs: (replace(case, window=case.window - 1), inputs),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_larger_than_rounding(fault: str) -> None:
    case = CASES[-1]
    inputs, into = case.inputs(torch.float32), into_output(case, torch.float32)
    wrong = truth(*FAULTS[fault](case, inputs), into)()
    ratios = compute_error_ratio(wrong, truth(case, inputs, into), torch.float32, stored=True)
    assert max(ratios.values()) > 100 * SAFETY_FACTOR


def test_results_repeat_bit_for_bit_and_a_shorter_call_is_a_part_of_a_longer(device: str) -> None:
    case = Case(1, 3, 40, 40, 8, 3, 1, is_linear=True, has_head_map=True)
    inputs, into = case.inputs(torch.float32, device), into_output(case, torch.float32, device)
    first, second = (differentiated(partial(cdape_attention, **case.options), inputs, into) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    q, k, v, *rest = inputs
    shorter = cdape_attention(q[:, :, :24], k[:, :, :24], v[:, :, :24], *rest, **case.options)
    assert torch.equal(shorter, first["output"][:, :, :24])


def test_invalid_maps_and_other_implementations_are_rejected() -> None:
    case = CASES[0]
    args = CdapeArgs(*case.inputs(torch.float32)[:-1])
    with pytest.raises(ValueError, match=r"head_map is torch.float32 \[2, 3\]; it must be torch.float32 \[3, 3\]"):
        op.cdape_attention(args._replace(head_map=torch.zeros(2, 3)))
    for changed in ({"is_linear": True}, {"head_map": torch.zeros(3, 3)}):
        with pytest.raises(ValueError, match="need the kernels for GPUs"):
            attend_on_cpu(args._replace(**changed))
        with pytest.raises(ValueError, match="cannot be combined with a linear processor or a head map"):
            attend_with_gates(args._replace(**changed, bias=None), torch.zeros(2, 3, 9), torch.zeros(2, 3, 9))
