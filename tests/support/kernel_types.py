"""Combinations of kernel test cases and data types."""

from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import torch

Case = TypeVar("Case")


def pair_with_types(cases: Sequence[Case]) -> list[tuple[Case, torch.dtype]]:
    """Pair each case with data types: on a GPU with every type of the kernels.

    The interpreter takes seconds per case. It gets each case in float32, every other one also in float16, and every
    fourth one in bfloat16: the kernels differ only in casts.
    """
    if torch.cuda.is_available():
        return list(product(cases, (torch.float32, torch.float16, torch.bfloat16)))
    few = {torch.float32: cases, torch.float16: cases[::2], torch.bfloat16: cases[1::4]}
    return [(case, dtype) for dtype, some in few.items() for case in some]
