"""Triton's interpreter without two things that take two thirds of its time and change nothing that it computes.

Integers are computed a second time in 64 bits for an assertion about overflow, which is then dropped unless Triton
debugs; and at each call of a device function Triton's language is searched for what the interpreter replaces in it,
though the launch around the call has replaced it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function's call inside a launch."""
    return function.rewrite()(*args, **kwargs)


@contextmanager
def lean() -> Iterator[None]:
    """Launches in the block do without both."""
    builder, function = interpreter.interpreter_builder, interpreter.InterpretedFunction
    options, call = builder.options, function.__call__
    # A launch replaces what its kernel's file names `tl`; Triton's own device functions know the language as `core`.
    core = interpreter._patch_lang(tl.zeros.fn)
    builder.options = replace(options, sanitize_overflow=options.debug)
    function.__call__ = _call
    try:
        yield
    finally:
        builder.options, function.__call__ = options, call
        core.restore()
