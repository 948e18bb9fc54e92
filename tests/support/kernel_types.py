"""Which cases of a kernel are tried in which types."""

from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import torch

Case = TypeVar("Case")


def pair_with_types(cases: Sequence[Case]) -> list[tuple[Case, torch.dtype]]:
    """On a GPU each case in each type that kernels compute in.

    The interpreter takes seconds for them and computes bfloat16 wrongly: there each case in float32, and every other
    one in float16 too, of which the kernels only cast differently.
    """
    if torch.cuda.is_available():
        return list(product(cases, (torch.float32, torch.float16, torch.bfloat16)))
    return [(case, torch.float32) for case in cases] + [(case, torch.float16) for case in cases[::2]]
