"""Combinations of kernel test cases and data types."""

from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import torch

Case = TypeVar("Case")


def pair_with_types(cases: Sequence[Case]) -> list[tuple[Case, torch.dtype]]:
    """Pair each case with data types: on a GPU with every type of the kernels.

    The interpreter takes seconds per case and computes bfloat16 incorrectly. It gets each case in float32, and every
    other one also in float16, for which the kernels differ only in casts.
    """
    if torch.cuda.is_available():
        return list(product(cases, (torch.float32, torch.float16, torch.bfloat16)))
    return [(case, torch.float32) for case in cases] + [(case, torch.float16) for case in cases[::2]]
