"""One process among all of a run, and the variables that tell it so.

torch, DeepSpeed and this project read torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. What other launchers set is turned into them (`surroundings.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One process among all of a run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among the processes of this machine: the GPU that is its own."""
    local_world: int | None = None
    """Processes of the run on this machine; None: all of them."""

    @property
    def here(self) -> int:
        """Processes of the run on this machine."""
        return self.local_world or self.world

    def variables(self, address: str, port: int) -> dict[str, str]:
        """The environment that says this place, and where the processes meet: a host's name or number, and a port."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
