"""The interpreter as our operators use it: as Triton made it afterwards, and before."""

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

from kernels.runtime import fast_interpreter


def _replaced() -> list[object]:
    functions = (interpreter._get_np_dtype, InterpretedFunction.__call__, tl.core.full, tl.core.tensor.__add__)
    return [interpreter_builder.options, *functions, tl.block_type.__init__, tl.tensor.__init__]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")
def test_what_it_does_without_is_back_afterwards_even_after_an_error() -> None:
    before = _replaced()

    def fail() -> None:
        with fast_interpreter():
            assert all(now is not then for now, then in zip(_replaced(), before, strict=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(now is then for now, then in zip(_replaced(), before, strict=True))
