"""Tests' assertions about rounding. The model of it is `megatron/utils/rounding.py`, which runs read too.

`assert_within_rounding` holds a result to SAFETY_FACTOR times the size of rounding errors, in the norm of its errors
and in the largest. `assert_close_in_rounding` holds two evaluations in one type, neither of them the truth, to the same
model of rounding, by hand.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.utils.rounding import (
    NUM_DRAWS,
    SAFETY_FACTOR,
    Results,
    RoundingMode,
    compute_excess,
    compute_size_ratio,
    estimate_rounding_sizes,
)

__all__ = [
    "NUM_DRAWS",
    "SAFETY_FACTOR",
    "Results",
    "RoundingMode",
    "assert_close_in_rounding",
    "assert_within_rounding",
    "compute_excess",
    "compute_size_ratio",
    "compute_tolerance",
    "count_gpt_sums",
    "estimate_rounding_sizes",
]


def assert_within_rounding(found: Results, compute: Callable[[], Results], dtype: torch.dtype, **model: bool) -> None:
    """Every result's error is at most SAFETY_FACTOR times what rounding gives. Arguments as in `compute_excess`."""
    for name, ratio in compute_excess(found, compute, dtype, **model).items():
        assert ratio <= SAFETY_FACTOR, f"{name}: its error is {ratio:.3g} times what rounding in {dtype} gives"


def compute_tolerance(terms: int, sums: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """How far two evaluations of one formula in the same type may be apart, in units of the size of its terms.

    Each is off by √terms · u after a sum and by √sums times that after so many that follow on one another, whose errors
    are independent; the difference of two is √2 times as large; SAFETY_FACTOR as above.

    Args:
        terms: of the longest of the sums.
        sums: how many follow on one another.
        dtype: that they are computed in.
    """
    return SAFETY_FACTOR * math.sqrt(2 * terms * sums) * torch.finfo(dtype).eps / 2


def count_gpt_sums(width: int, layers: int) -> tuple[int, int]:
    """Terms of the longest sum of a GPT's forward pass and how many follow on one another, for
    `compute_tolerance`.

    The longest is that of the MLP's second matrix. In a layer eleven follow on one another: two norms, four matrices,
    scores, a processor's two convolutions, softmax, values; at the end come a norm and the output layer.
    """
    return 4 * width, 11 * layers + 2


def assert_close_in_rounding(ours: Tensor, reference: Tensor, terms: int, sums: int = 1, size: float = 1.0) -> None:
    """Two evaluations in the type of `ours` are within `compute_tolerance(terms, sums)`; infinities are equal.

    Args:
        size: of a sum's terms together, where the largest of all results is smaller.
    """
    assert ours.shape == reference.shape
    finite = reference.isfinite()
    assert torch.equal(ours[~finite], reference[~finite]), "not infinite where the other is"
    if finite.any():
        allowed = compute_tolerance(terms, sums, ours.dtype) * max(reference[finite].abs().max().item(), size)
        error = (ours[finite].double() - reference[finite].double()).abs().max().item()
        assert error <= allowed, f"{error:.3g} apart; {terms} terms, {sums} sums after one another give {allowed:.3g}"
