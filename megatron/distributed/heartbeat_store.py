"""What each process of a run tells the others about itself, without waiting for anybody: small texts in a store.

The store is the one over which the processes met (torch's TCPStore, which the first process serves), so nothing here is
a collective: any thread may write and read, also while others wait in a collective that never ends.
"""

from typing import Any

import torch.distributed as dist

from megatron.distributed.process_groups import ProcessGroups


class HeartbeatStore:
    """One thread's view of the texts. A thread that may have to wait for the store has one of its own (`copy`)."""

    def __init__(self, groups: ProcessGroups, store: Any = None) -> None:
        self.rank, self.world_size = groups.rank, groups.world_size
        self._processes = groups
        if store is None and self.world_size == 1:
            store = dist.HashStore()
        elif store is None:
            default: Any = dist.distributed_c10d._get_default_store()
            store = default.clone()
        self._store = store

    def copy(self) -> "HeartbeatStore":
        """The same texts over a connection of its own."""
        return HeartbeatStore(self._processes, self._store if self.world_size == 1 else self._store.clone())

    def set(self, key: str, text: str) -> None:
        """Set a text of this process. Costs microseconds: no answer is waited for."""
        self._store.set(f"beats/{key}/{self.rank}", text)

    def get(self, key: str, rank: int = 0) -> str | None:
        """A text of a process, None if it has told none."""
        full_key = f"beats/{key}/{rank}"
        return self._store.get(full_key).decode() if self._store.check([full_key]) else None
