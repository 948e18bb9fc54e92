"""A repeated launch uses the program that Triton itself would choose for its arguments."""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from megatron.kernels.runtime import Tile, launch


class Rows(NamedTuple):
    ptr: Any
    stride: Any


@triton.jit
def _copy_kernel(x, y, rows, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n) * scale
    if rows.ptr is not None:
        value += tl.load(rows.ptr + i.to(tl.int64) * rows.stride, i < n)
    tl.store(y + i, value, i < n)


INTEGERS = (0, 1, 2, 16, 17, 48, -16, -1, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1)
OPTIONS = Tile(1, 1, 4, 1).options


def _launched(arguments: tuple[Any, ...], block: int = 16) -> Any:
    return launch(_copy_kernel, (1, 1, 1), arguments, {"BLOCK": block}, OPTIONS)


def _triton_compiled(arguments: tuple[Any, ...], block: int = 16) -> Any:
    return _copy_kernel[(1,)](*arguments, BLOCK=block, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_code_is_launched_as_by_triton(dtype: torch.dtype) -> None:
    x = torch.zeros(64, dtype=dtype, device="cuda")
    tensors = (x, x[1:], x[8:], x.float())
    rows = [Rows(pointer, stride) for pointer, stride in product((None, x, x[1:]), (1, 16, 3, 2**31))]
    calls = [(x, x, rows[0], n, 1.0) for n in INTEGERS]
    calls += [(first, second, rows[1], 5, 0.5) for first, second in product(tensors, tensors)]
    calls += [(x, x, each, 16, 2.0) for each in rows]
    for call in calls:  # so that each is known when it comes again, in another order
        _launched(call)
    compiled = {call_index: _launched(call) for call_index, call in reversed(list(enumerate(calls)))}
    assert all(compiled[index] is _triton_compiled(call) for index, call in enumerate(calls))
    assert len({id(code) for code in compiled.values()}) > 10  # there is something to confuse


def test_constants_distinguish_compiled_code() -> None:
    x = torch.zeros(64, device="cuda")
    call = (x, x, Rows(None, 1), 5, 1.0)
    first, second = _launched(call, 16), _launched(call, 32)
    assert first is not second
    assert (_launched(call, 16), _launched(call, 32)) == (first, second)


def test_a_hook_is_called_for_every_launch() -> None:
    x = torch.zeros(64, device="cuda")
    call = (x, x, Rows(None, 1), 5, 1.0)
    _launched(call)
    reported = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(reported.append)
    try:
        _launched(call)
    finally:
        hook.remove(reported.append)
    assert len(reported) == 1
