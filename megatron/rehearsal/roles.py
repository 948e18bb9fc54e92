"""Which of a run's ranks are rehearsed, and for which others each of them stands.

Ranks of one pipeline stage run the same program on tensors of the same shapes. What still differs lies at the ends of
the other dimensions: the first tensor-parallel rank counts what all of them hold, a context-parallel rank's memory
follows from the chunks that it has (the first and the last differ most), ZeRO pads its last partition, and rank 0
writes. So two ranks of each stage are run, the first and the last along all other dimensions, and each of the others is
stood for by the nearer one. That they issue the same operations is then compared, not assumed
(`megatron.rehearsal.matching`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.distributed.mesh import DIMENSION_ORDER, Dimension, ParallelSizes
from megatron.utils.errors import UserError

INNER_DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "data")
"""Those in which ranks of one pipeline stage differ."""


@dataclass(frozen=True)
class Role:
    """Ranks of one pipeline stage that do the same, and the one of them that is run."""

    rank: int
    """The one that is run."""
    stands_for: tuple[int, ...]
    """All of them, in order."""

    def describe_coordinates(self, sizes: ParallelSizes) -> str:
        """Of the rank that is run, along the dimensions that have more than one: `stage 1, tensor 0, data 3`."""
        coordinates = sizes.coordinates(self.rank)
        names = {"pipeline": "stage"}
        parts = [
            f"{names.get(dimension, dimension)} {coordinates[dimension]}"
            for dimension in reversed(DIMENSION_ORDER)
            if getattr(sizes, dimension) > 1
        ]
        return ", ".join(parts) or "the only rank"


def choose_roles(sizes: ParallelSizes, selection: str | Sequence[int] = "roles") -> list[Role]:
    """The roles whose ranks are run, in the order of ranks.

    Args:
        sizes: of the mesh.
        selection: `roles`, two ranks of each pipeline stage; `all`; or the ranks themselves.

    Raises:
        UserError: a rank that the mesh does not have.
    """
    if selection == "all":
        return [Role(rank, (rank,)) for rank in range(sizes.world_size)]
    if isinstance(selection, str):
        chosen = sorted({rank for stage in list_stages(sizes) for rank in (stage[0], stage[-1])})
    else:
        chosen = sorted(set(selection))
        if outside := [rank for rank in chosen if not 0 <= rank < sizes.world_size]:
            raise UserError(f"--ranks {outside[0]}: it must be from 0 to {sizes.world_size - 1}")
    represented: dict[int, list[int]] = {rank: [] for rank in chosen}
    for stage in list_stages(sizes):
        candidates = [rank for rank in stage if rank in represented]
        for rank in stage if candidates else ():
            represented[min(candidates, key=lambda other: _distance(sizes, rank, other))].append(rank)
    return [Role(rank, tuple(represented[rank])) for rank in chosen]


def list_stages(sizes: ParallelSizes) -> list[tuple[int, ...]]:
    """The ranks of each pipeline stage, the first stage first."""
    return sizes.list_groups(*INNER_DIMENSIONS)


def _distance(sizes: ParallelSizes, one: int, other: int) -> tuple[float, int]:
    """How far two ranks of a stage are from each other, of a mesh of edge 1; the lower rank is the nearer of two."""
    if one == other:
        return (-1.0, other)
    first, second = sizes.coordinates(one), sizes.coordinates(other)
    edges = ((d, getattr(sizes, d) - 1) for d in INNER_DIMENSIONS)
    return (sum(abs(first[d] - second[d]) / edge for d, edge in edges if edge), other)


def parse_rank_selection(text: str) -> str | list[int]:
    """`roles`, `all`, or ranks as 0,5,60-63. Raises UserError."""
    if text in ("roles", "all"):
        return text
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.isdecimal() and len(number) <= 4 for number in numbers) or int(numbers[0]) > int(numbers[-1]):
            raise UserError(f"--ranks is {text!r}; it must be roles, all, or ranks such as 0,5,60-63")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def find_varying_dimensions(sizes: ParallelSizes, ranks: Sequence[int]) -> frozenset[Dimension]:
    """The dimensions of the mesh along which these ranks differ."""
    coordinates = [sizes.coordinates(rank) for rank in ranks]
    return frozenset(d for d in DIMENSION_ORDER if len({place[d] for place in coordinates}) > 1)


def translate_rank(
    sizes: ParallelSizes, member: int, source: int, target: int, along: frozenset[Dimension], *, is_relative: bool
) -> int:
    """The rank that is to `target` what `member` is to `source`, both of one pipeline stage.

    Args:
        sizes: of the mesh.
        member: a rank of a group of `source`, or the other side of what it sends.
        source: a rank that was run.
        target: a rank that it stands for.
        along: the dimensions in which the group's members differ.
        is_relative: members stand at the same distance from either (the next one of a ring), and not at the same place
            of the group (its first rank). Stages are named by their place always.
    """
    place, origin, goal = (sizes.coordinates(rank) for rank in (member, source, target))
    rank, stride = 0, 1
    for dimension in DIMENSION_ORDER:
        size = getattr(sizes, dimension)
        if dimension not in along:
            coordinate = goal[dimension]
        elif is_relative and dimension != "pipeline":
            coordinate = (place[dimension] - origin[dimension] + goal[dimension]) % size
        else:
            coordinate = place[dimension]
        rank, stride = rank + stride * coordinate, stride * size
    return rank


def translate_group(sizes: ParallelSizes, ranks: Sequence[int], source: int, target: int) -> tuple[int, ...]:
    """The group of `target` that corresponds to a group of `source`: the one along the same dimensions, or of the
    ranks at the same distances where that one does not hold `target`."""
    along = find_varying_dimensions(sizes, ranks)
    for is_relative in (False, True):
        group = [translate_rank(sizes, rank, source, target, along, is_relative=is_relative) for rank in ranks]
        if target in group:
            break
    return tuple(sorted(group))
