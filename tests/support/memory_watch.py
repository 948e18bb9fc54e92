"""Check the memory accesses of interpreted Triton kernels.

The interpreter runs the programs of a grid one after another, and reads and writes any address of the process. On a GPU
an access outside of the arguments ends the process, programs run at the same time, and a program's threads see each
other's writes to global memory only after a barrier.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

from megatron.kernels import interpreter as fast

OUTSIDE = "outside of the arguments"
SHARED = "of what another program writes"
UNORDERED = "of what the program has written, without a barrier"
NOBODY, SEVERAL = -1, -2


class MemoryWatch:
    """Faults of the launches inside `watch_memory`, and the names of the launched kernels."""

    def __init__(self) -> None:
        self.faults: Counter[tuple[str, str]] = Counter()
        """Number of accesses by kernel and kind of fault."""
        self.launched: set[str] = set()

    def begin(self, kernel: str, tensors: Iterable[Tensor]) -> None:
        """Begin a launch that may access the storages of these tensors."""
        self.kernel, self.program, self.turn = kernel, NOBODY, 0
        self.launched.add(kernel)
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        self.begins = np.array(sorted(sizes), dtype=np.uint64)
        self.sizes = np.array([sizes[int(begin)] for begin in self.begins], dtype=np.uint64)
        self.places = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.writers, self.readers, self.turns = (np.full(int(self.places[-1]), NOBODY) for _ in range(3))

    def access(self, addresses: NDArray[Any], mask: NDArray[Any], size: int, *, writes: bool) -> None:
        """Check the accesses to elements of `size` bytes where the mask is True."""
        flat = addresses.reshape(-1)[np.broadcast_to(mask, addresses.shape).reshape(-1).astype(bool)].astype(np.uint64)
        index = np.searchsorted(self.begins, flat, side="right") - 1
        offsets = flat - self.begins[np.maximum(index, 0)] if len(self.begins) else flat
        inside = index >= 0
        inside[inside] = offsets[inside] + np.uint64(size) <= self.sizes[index[inside]]
        at = self.places[index[inside]] + offsets[inside].astype(np.int64)
        writers, readers = self.writers[at], self.readers[at]
        shared = (writers >= 0) & (writers != self.program)
        if writes:
            shared |= (readers != NOBODY) & (readers != self.program)
        unordered = (writers == self.program) & (self.turns[at] == self.turn)
        for kind, found in ((OUTSIDE, ~inside), (SHARED, shared), (UNORDERED, unordered)):
            if found.any():
                self.faults[self.kernel, kind] += int(found.sum())
        if writes:
            self.writers[at], self.turns[at] = self.program, self.turn
        else:
            self.readers[at] = np.where((readers == NOBODY) | (readers == self.program), self.program, SEVERAL)


def _list_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _list_tensors(value)


@contextmanager
def watch_memory() -> Iterator[MemoryWatch]:
    """Check all launches of interpreted kernels inside the context."""
    watch, memory = MemoryWatch(), interpreter._interpreter
    builder, executor, recorder = interpreter.InterpreterBuilder, interpreter.GridExecutor, fast._Recorder
    set_program, call, note = builder.set_grid_idx, executor.__call__, recorder._note

    class Memory:
        def __getattr__(self, name: str) -> Any:
            return getattr(memory, name)

        def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
            watch.access(addresses, mask, np.dtype(dtype).itemsize, writes=False)
            return memory.load(addresses, mask, other, dtype)

        def store(self, addresses: Any, values: Any, mask: Any) -> Any:
            watch.access(addresses, mask, values.dtype.itemsize, writes=True)
            return memory.store(addresses, values, mask)

    def begin_program(self: Any, *position: int) -> None:
        watch.program += 1
        set_program(self, *position)

    def pass_barrier(self: Any) -> None:
        watch.turn += 1

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.begin(self.fn.__name__, _list_tensors([*args, *kwargs.values()]))
        return call(self, *args, **kwargs)

    def record(self: Any, method: str, *args: Any) -> Any:
        self.is_complete &= method != "create_barrier"  # a replayed plan has no barrier
        return note(self, method, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_PLANS", defaultdict(lambda: defaultdict(dict)))  # plans of earlier launches lack barriers
        patch.setattr(interpreter, "_interpreter", Memory())
        patch.setattr(builder, "set_grid_idx", begin_program)
        patch.setattr(builder, "create_barrier", pass_barrier)
        patch.setattr(executor, "__call__", launch)
        patch.setattr(recorder, "_note", record)
        yield watch
