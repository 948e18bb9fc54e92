"""Runs code as if its tensors were on another device, as far as that goes without numbers: PyTorch's "meta" device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

DEVICE = "meta"
ENDS = ("meta tensor", "data-independent", "torch dispatch mode present")
"""What the errors say that end a rehearsal: a number was asked for, or the compiler, which takes no such modes."""


def check(what: object, arguments: object) -> None:
    """Raises if one of the tensors in the arguments is on the CPU."""
    astray = [list(x.shape) for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.device.type == "cpu"]
    if astray:
        raise AssertionError(f"{what} was given tensors on the CPU, {astray}, not on the device of the test")


class OperatorsTakeItsTensors(TorchDispatchMode):
    """Our operators get no tensor that is on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "farfield":
            check(func, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _launch(kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
    check(kernel.fn.__name__, (args, kwargs))


@contextmanager
def on_another_device() -> Iterator[None]:
    """Tensors on DEVICE have a shape and a type but no number; asking for one ends the block."""
    with pytest.MonkeyPatch.context() as patch, OperatorsTakeItsTensors():
        patch.setattr(InterpretedFunction, "run", _launch)
        try:
            yield
        except (NotImplementedError, RuntimeError) as error:
            if not any(reason in str(error).lower() for reason in ENDS):
                raise
