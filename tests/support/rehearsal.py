"""Run code with tensors on PyTorch's "meta" device, as far as possible without values."""

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
"""Error messages that end a rehearsal: a value was read, or the compiler does not support such modes."""


def check(what: object, arguments: object) -> None:
    """Raise an error if an argument is a CPU tensor."""
    astray = [list(x.shape) for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.device.type == "cpu"]
    if astray:
        raise AssertionError(f"{what} was given tensors on the CPU, {astray}, not on the device of the test")


class OperatorsTakeItsTensors(TorchDispatchMode):
    """Mode that rejects CPU tensors as arguments of our operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "farfield":
            check(func, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _launch(kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
    check(kernel.fn.__name__, (args, kwargs))


@contextmanager
def on_another_device() -> Iterator[None]:
    """Create tensors on DEVICE with shape and type but no values; reading a value ends the block."""
    with pytest.MonkeyPatch.context() as patch, OperatorsTakeItsTensors():
        patch.setattr(InterpretedFunction, "run", _launch)
        try:
            yield
        except (NotImplementedError, RuntimeError) as error:
            if not any(reason in str(error).lower() for reason in ENDS):
                raise
