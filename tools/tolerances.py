"""Test assertions about rounding errors, based on the model of `megatron/utils/rounding.py`, which runs also use.

`assert_within_rounding` limits a result's errors to SAFETY_FACTOR times the size of rounding errors, in norm and in
maximum. `assert_close_in_rounding` compares two evaluations in one data type, neither of which is exact, with
tolerances from the same model.
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
    compute_error_ratio,
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
    "compute_error_ratio",
    "compute_size_ratio",
    "compute_tolerance",
    "count_gpt_sums",
    "estimate_rounding_sizes",
]


def assert_within_rounding(found: Results, compute: Callable[[], Results], dtype: torch.dtype, **model: bool) -> None:
    """Assert that every result's error is at most SAFETY_FACTOR times the rounding error.

    Arguments as in `compute_error_ratio`.
    """
    for name, ratio in compute_error_ratio(found, compute, dtype, **model).items():
        assert ratio <= SAFETY_FACTOR, f"{name}: error is {ratio:.3g} times the rounding error of {dtype}"


def compute_tolerance(terms: int, sums: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Return the allowed difference of two evaluations of a formula in one data type.

    It is relative to the size of its terms.

    Each evaluation has an error of √terms · u after one sum, and √sums times that after consecutive sums with
    independent errors. The difference of two evaluations is √2 times as large. SAFETY_FACTOR applies as above.

    Args:
        terms: number of terms of the longest sum.
        sums: number of consecutive sums.
        dtype: data type of the computation.
    """
    return SAFETY_FACTOR * math.sqrt(2 * terms * sums) * torch.finfo(dtype).eps / 2


def count_gpt_sums(width: int, layers: int) -> tuple[int, int]:
    """Return the terms of the longest sum and the number of consecutive sums in a GPT's forward pass.

    Both are arguments of `compute_tolerance`. The longest sum is that of the MLP's second matrix. A layer has eleven
    consecutive sums: two norms, four matrices, scores, a processor's two convolutions, softmax, values. A norm and the
    output layer follow the last layer.
    """
    return 4 * width, 11 * layers + 2


def assert_close_in_rounding(ours: Tensor, reference: Tensor, terms: int, sums: int = 1, size: float = 1.0) -> None:
    """Assert that two evaluations in the type of `ours` differ by at most `compute_tolerance(terms, sums)`.

    Infinities must be equal.

    Args:
        size: size of a sum's terms, if the largest of all results is smaller.
    """
    assert ours.shape == reference.shape
    finite = reference.isfinite()
    assert torch.equal(ours[~finite], reference[~finite]), "infinities differ"
    if finite.any():
        allowed = compute_tolerance(terms, sums, ours.dtype) * max(reference[finite].abs().max().item(), size)
        error = (ours[finite].double() - reference[finite].double()).abs().max().item()
        assert error <= allowed, (
            f"difference {error:.3g}; {terms} terms and {sums} consecutive sums allow {allowed:.3g}"
        )
