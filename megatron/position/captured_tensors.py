"""Keep cached tensors alive for the CUDA graphs that read them.

A graph stores the address of every tensor that existed before its capture. A cache may evict such a tensor, after which
the graph would read memory that belongs to others. Caches therefore pass what they return to `keep_for_capture`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_captures: list[list[Tensor]] = []


@contextmanager
def collect_captured_tensors() -> Iterator[list[Tensor]]:
    """Collect the cached tensors that are used inside. The owner of a graph must keep the list as long as the graph."""
    tensors: list[Tensor] = []
    _captures.append(tensors)
    try:
        yield tensors
    finally:
        _captures.pop()


def keep_for_capture(*tensors: Tensor) -> None:
    """Add tensors of a cache that can evict them to the capture in progress, if there is one."""
    if _captures:
        _captures[-1] += tensors
