"""Our interpreter gives Triton's own results in all types but bfloat16, and restores Triton's state afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

from megatron.kernels import interpreter as ours
from megatron.kernels.interpreter import fast_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")

SIZE, PROGRAMS = 4, 2
TYPES = (torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
NUMBERS = (0, 1, 1.0, True, -3, 2.5, 300)
"""Values that are equal in Python but not in Triton: 1, 1.0 and True."""

# Functions of two blocks; `p` are pointers to the first.
OF_BLOCKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "x + x": lambda x, y, p: x + x,
    "x + y": lambda x, y, p: x + y,
    "x - y": lambda x, y, p: x - y,
    "x * y": lambda x, y, p: x * y,
    "x / y": lambda x, y, p: x / y,
    "x // y": lambda x, y, p: x // y,
    "x % y": lambda x, y, p: x % y,
    "x & y": lambda x, y, p: x & y,
    "x | y": lambda x, y, p: x | y,
    "x ^ y": lambda x, y, p: x ^ y,
    "x << y": lambda x, y, p: x << (y & 3),
    "x >> y": lambda x, y, p: x >> (y & 3),
    "x < y": lambda x, y, p: x < y,
    "x <= y": lambda x, y, p: x <= y,
    "x == y": lambda x, y, p: x == y,
    "x != y": lambda x, y, p: x != y,
    "-x": lambda x, y, p: -x,
    "~x": lambda x, y, p: ~x,
    "abs": lambda x, y, p: tl.abs(x),
    "exp": lambda x, y, p: tl.exp(x),
    "maximum": lambda x, y, p: tl.maximum(x, y),
    "minimum": lambda x, y, p: tl.minimum(x, y),
    "where": lambda x, y, p: tl.where(x > y, x, y),
    "cast": lambda x, y, p: x.to(y.dtype),
    "bits": lambda x, y, p: x.to(tl.int32, bitcast=True),
    "outer": lambda x, y, p: x[:, None] * y[None, :],
    "product": lambda x, y, p: tl.dot(x[:, None] + x[None, :], y[:, None] - y[None, :], input_precision="ieee"),
    "transposed": lambda x, y, p: tl.trans(x[:, None] - y[None, :]),
    "reshaped": lambda x, y, p: tl.reshape(x, (2, SIZE // 2)),
    "broadcast": lambda x, y, p: tl.broadcast_to(x[:, None], (SIZE, 2)),
    "joined": lambda x, y, p: tl.join(x, y),
    "split": lambda x, y, p: tl.split(tl.join(x, y))[1],
    "gathered": lambda x, y, p: tl.gather(x, tl.arange(0, SIZE) % 3, axis=0),
    "sum": lambda x, y, p: tl.sum(x, 0),
    "largest": lambda x, y, p: tl.max(x[:, None] + y[None, :], 1),
    "loaded": lambda x, y, p: tl.load(p),
    "loaded in part": lambda x, y, p: tl.load(p, mask=x > y, other=7),
    "loaded elsewhere": lambda x, y, p: tl.load(p + (y > x)),
    "loaded before": lambda x, y, p: tl.load(p + 2 - 2 * (y > x).to(tl.int64)),
    "pointers": lambda x, y, p: p + y,
    "pointers less": lambda x, y, p: p - y,
    "pointers alike": lambda x, y, p: p == p + 1,
    "range": lambda x, y, p: tl.arange(0, SIZE),
    "zeros": lambda x, y, p: tl.zeros((SIZE, 2), tl.float16),
    "program": lambda x, y, p: tl.program_id(0),
    "programs": lambda x, y, p: tl.num_programs(0) * x,
    "number + x": lambda x, y, p: [number + x for number in NUMBERS],
    "x - number": lambda x, y, p: [x - number for number in NUMBERS],
    "x * number": lambda x, y, p: [x * number for number in NUMBERS],
    "x / number": lambda x, y, p: [x / number for number in NUMBERS[1:]],
    "x > number": lambda x, y, p: [x > number for number in NUMBERS],
    "full": lambda x, y, p: [tl.full((SIZE,), number, y.dtype) for number in NUMBERS],
    "constant": lambda x, y, p: [x + tl.constexpr(number) for number in NUMBERS],
}
found: list[Any] = []


def _note_results(x: Any, y: Any, p: Any) -> None:
    """Record every bit of the results, or that there is none, because not all types can be combined."""
    for name, compute in OF_BLOCKS.items():
        try:
            result = compute(x, y, p)
        except Exception:
            found.append((name, None))
            continue
        for part in result if isinstance(result, list) else [result]:
            data = part.handle.data
            found.append((name, str(part.type), str(part.shape), data.dtype, data.shape, data.tobytes()))


@triton.jit
def _compute_each(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + places), tl.load(y_ptr + places)
    _note_results(x, y, x_ptr + places)
    _note_results(tl.sum(x, 0), y, x_ptr + places)  # a scalar and a block
    tl.store(out_ptr + places, x, mask=x != y)
    tl.device_print("tensors ", x, y)


def _compute(x: Tensor, y: Tensor) -> list[Any]:
    found.clear()
    printed = StringIO()
    out = torch.zeros_like(x)
    with np.errstate(all="ignore"), redirect_stdout(printed):
        _compute_each[(PROGRAMS,)](x, y, out, SIZE)
    return [*found, out.tolist(), printed.getvalue()]


@contextmanager
def _plain_interpreter() -> Iterator[None]:
    """Use Triton's interpreter, and restore the language functions that it leaves replaced."""
    scopes: list[Any] = []
    replace_language = interpreter._patch_lang
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda kernel: scopes.append(replace_language(kernel)) or scopes[-1])
        yield
    for scope in reversed(scopes):
        scope.restore()


def test_it_computes_every_bit_as_the_plain_interpreter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second program, with other values, replays the operations recorded from the first."""
    monkeypatch.setattr(ours, "_PLANS", type(ours._PLANS)(ours._PLANS.default_factory))
    generator = torch.Generator().manual_seed(0)
    mixed = product(TYPES, (torch.float16, torch.uint8, torch.int32))
    for first, second in dict.fromkeys([*zip(TYPES, TYPES, strict=True), *mixed]):
        x, y = (torch.randint(-99, 100, (PROGRAMS * SIZE + 3,), generator=generator).to(to) for to in (first, second))
        with _plain_interpreter():
            plain = _compute(x, y)
        with fast_interpreter():
            fast = _compute(x, y)
        for expected, result in zip(plain, fast, strict=True):
            assert result == expected, (first, second)
    unplanned = {name for plans in ours._PLANS.values() for name, known in plans.items() if None in known.values()}
    assert {function.__name__ for function in unplanned} == {"split", "device_print"}


def _replaced() -> list[object]:
    functions = (interpreter._get_np_dtype, interpreter._patch_attr, InterpretedFunction.__call__)
    checks = interpreter.TensorHandle.__post_init__, interpreter.ReduceScanOpInterface.check_tensor
    builder = interpreter_builder.__class__, interpreter_builder.options
    return [*builder, *functions, *checks, tl.core.full, tl.core.tensor.__add__]


def test_the_interpreter_is_restored_even_after_an_error() -> None:
    before = _replaced()

    def fail() -> None:
        with fast_interpreter():
            assert all(now is not then for now, then in zip(_replaced(), before, strict=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(now is then for now, then in zip(_replaced(), before, strict=True))
