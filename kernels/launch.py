"""How kernels are launched: the same values launch one (`op.py`) and compile it for a GPU that is not here
(`compiled.py`)."""

from dataclasses import dataclass
from typing import Any

INPUT_PRECISION = "ieee"
"""Of matrix products of float32: exact to the type, no TF32. Half types are not affected."""


@dataclass(frozen=True)
class Tile:
    """The block of one program, and what computes it."""

    block_m: int
    """Rows."""
    block_n: int
    """Columns; in CDAPE's mixer and in sums over diagonals, distances."""
    num_warps: int
    num_stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """As constants of the kernel."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. Multiply and add in one rounding: Triton's default depends on its version."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
