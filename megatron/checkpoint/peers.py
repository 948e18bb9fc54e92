"""What saving and loading need to know of the other processes of a run."""

from typing import Any, Protocol


class Peers(Protocol):
    """This process among all of a run; `megatron.training.processes.Processes` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def first(self) -> bool:
        """Is this the process that writes what all share?"""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in the order of ranks. All must call it."""
        ...

    def agree(self, error: str | None) -> str | None:
        """The first error that any process reports. All must call it."""
        ...
