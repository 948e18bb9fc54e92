"""Which of a run's processes this one is, as its launcher says in the environment.

The variables are torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. With none of them set a run is one
process and needs neither port nor file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import UserError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One process among all of a run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among the processes of this machine: the GPU that is its own."""

    @staticmethod
    def told(environment: Mapping[str, str] = os.environ) -> "Place | None":
        """What the launcher said; None if nobody did.

        Raises:
            UserError: only part of the variables is set, or they are not numbers.
        """
        missing = [name for name in (*NUMBERS, *MEETING) if name not in environment]
        if missing:
            if "RANK" in environment and environment.get("WORLD_SIZE", "1") != "1":
                raise UserError(
                    f"environment: RANK is set, but {', '.join(missing)} is not; start with ./deepy.py train"
                )
            return None
        try:
            rank, world, local_rank = (int(environment[name]) for name in NUMBERS)
        except ValueError:
            raise UserError(f"{', '.join(NUMBERS)}: must be whole numbers in the environment") from None
        if not 0 <= rank < world:
            raise UserError(f"environment: RANK is {rank}, but WORLD_SIZE is {world}")
        return Place(rank, world, local_rank)

    def variables(self, address: str, port: int) -> dict[str, str]:
        """The environment in which `told` finds this place, on a machine that has all processes of the run."""
        numbers = (self.rank, self.world, self.local_rank)
        return {
            **{name: str(number) for name, number in zip(NUMBERS, numbers, strict=True)},
            "LOCAL_WORLD_SIZE": str(self.world),
            **dict(zip(MEETING, (address, str(port)), strict=True)),
        }
