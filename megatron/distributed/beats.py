"""What each process of a run tells the others about itself, without waiting for anybody: small texts in a store.

The store is the one over which the processes met (torch's TCPStore, which the first process serves), so nothing here is
a collective: any thread may write and read, also while others wait in a collective that never ends.
"""

from typing import Any

import torch.distributed as dist

from megatron.distributed.processes import Processes


class Beats:
    """One thread's view of the texts. A thread that may have to wait for the store has one of its own (`copy`)."""

    def __init__(self, processes: Processes, store: Any = None) -> None:
        self.rank, self.world = processes.rank, processes.world
        self._processes = processes
        if store is None and self.world == 1:
            store = dist.HashStore()
        elif store is None:
            default: Any = dist.distributed_c10d._get_default_store()
            store = default.clone()
        self._store = store

    def copy(self) -> "Beats":
        """The same texts over a connection of its own."""
        return Beats(self._processes, self._store if self.world == 1 else self._store.clone())

    def tell(self, what: str, text: str) -> None:
        """Set a text of this process. Costs microseconds: no answer is waited for."""
        self._store.set(f"beats/{what}/{self.rank}", text)

    def told(self, what: str, rank: int = 0) -> str | None:
        """A text of a process, None if it has told none."""
        key = f"beats/{what}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None
