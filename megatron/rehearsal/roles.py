"""Selection of the ranks to rehearse, and of the ranks that each of them represents.

Ranks of one pipeline stage run the same program on tensors of the same shapes. Differences remain at the ends of the
other dimensions. The first tensor-parallel rank counts replicated tensors. A context-parallel rank's memory depends on
its chunks, and the first and the last rank differ most. ZeRO pads its last partition, and rank 0 writes files. So a
rehearsal runs two ranks of each stage, the first and the last along all other dimensions; the nearer one represents
each remaining rank. `megatron.rehearsal.matching` then verifies that they issue the same operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.distributed.mesh import DIMENSION_ORDER, Dimension, ParallelSizes
from megatron.utils.errors import UserError

INNER_DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "data")
"""Dimensions in which ranks of one pipeline stage differ."""


@dataclass(frozen=True)
class RankRole:
    """Group of equivalent ranks of one pipeline stage, one of which is run."""

    rank: int
    """Rank that is run."""
    represented_ranks: tuple[int, ...]
    """All ranks of the group, in order."""

    def describe_coordinates(self, sizes: ParallelSizes) -> str:
        """Describe the coordinates of the running rank along dimensions larger than one.

        For example: `stage 1, tensor 0, data 3`.
        """
        coordinates = sizes.get_coordinates(self.rank)
        names = {"pipeline": "stage"}
        parts = [
            f"{names.get(dimension, dimension)} {coordinates[dimension]}"
            for dimension in reversed(DIMENSION_ORDER)
            if getattr(sizes, dimension) > 1
        ]
        return ", ".join(parts) or "the only rank"


def choose_roles(sizes: ParallelSizes, selection: str | Sequence[int] = "roles") -> list[RankRole]:
    """Choose the roles of a rehearsal, sorted by rank.

    Args:
        sizes: mesh sizes.
        selection: `roles` for two ranks of each pipeline stage, `all`, or a list of ranks.

    Raises:
        UserError: if a rank is not in the mesh.
    """
    if selection == "all":
        return [RankRole(rank, (rank,)) for rank in range(sizes.world_size)]
    if isinstance(selection, str):
        chosen = sorted({rank for stage in list_stages(sizes) for rank in (stage[0], stage[-1])})
    else:
        chosen = sorted(set(selection))
        if outside := [rank for rank in chosen if not 0 <= rank < sizes.world_size]:
            raise UserError(f"--ranks {outside[0]}: expected 0 to {sizes.world_size - 1}")
    represented: dict[int, list[int]] = {rank: [] for rank in chosen}
    for stage in list_stages(sizes):
        candidates = [rank for rank in stage if rank in represented]
        for rank in stage if candidates else ():
            represented[min(candidates, key=lambda other: _compute_distance(sizes, rank, other))].append(rank)
    return [RankRole(rank, tuple(represented[rank])) for rank in chosen]


def list_stages(sizes: ParallelSizes) -> list[tuple[int, ...]]:
    """List the ranks of each pipeline stage, first stage first."""
    return sizes.list_groups(*INNER_DIMENSIONS)


def _compute_distance(sizes: ParallelSizes, one: int, other: int) -> tuple[float, int]:
    """Return the distance between two ranks of a stage in a mesh with edges of length 1. The lower rank breaks ties."""
    if one == other:
        return (-1.0, other)
    first, second = sizes.get_coordinates(one), sizes.get_coordinates(other)
    edges = ((d, getattr(sizes, d) - 1) for d in INNER_DIMENSIONS)
    return (sum(abs(first[d] - second[d]) / edge for d, edge in edges if edge), other)


def parse_rank_selection(text: str) -> str | list[int]:
    """Parse `roles`, `all`, or ranks such as 0,5,60-63. Raises UserError for other values."""
    if text in ("roles", "all"):
        return text
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.isdecimal() and len(number) <= 4 for number in numbers) or int(numbers[0]) > int(numbers[-1]):
            raise UserError(f"--ranks {text!r}: expected roles, all, or ranks such as 0,5,60-63")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def find_varying_dimensions(sizes: ParallelSizes, ranks: Sequence[int]) -> frozenset[Dimension]:
    """Return the mesh dimensions along which these ranks differ."""
    coordinates = [sizes.get_coordinates(rank) for rank in ranks]
    return frozenset(d for d in DIMENSION_ORDER if len({place[d] for place in coordinates}) > 1)


def translate_rank(
    sizes: ParallelSizes, member: int, source: int, target: int, along: frozenset[Dimension], *, is_relative: bool
) -> int:
    """Return the rank that relates to `target` as `member` relates to `source`.

    Source and target share a pipeline stage.

    Args:
        sizes: mesh sizes.
        member: rank of a group of `source`, or the peer of its send or recv.
        source: rank that was run.
        target: rank that `source` represents.
        along: dimensions in which the group's members differ.
        is_relative: True to keep the distance (the next rank of a ring); False to keep the position in the group (its
            first rank). Pipeline stages always keep their position.
    """
    place, origin, goal = (sizes.get_coordinates(rank) for rank in (member, source, target))
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
    """Return the group of `target` that corresponds to a group of `source`.

    It is the group along the same dimensions, or the group at the same distances if the former does not contain
    `target`.
    """
    along = find_varying_dimensions(sizes, ranks)
    for is_relative in (False, True):
        group = [translate_rank(sizes, rank, source, target, along, is_relative=is_relative) for rank in ranks]
        if target in group:
            break
    return tuple(sorted(group))
