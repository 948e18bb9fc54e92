"""Ranks of a rehearsal: which ones run, which ranks each represents, and the translation of their NCCL calls.

Ranks of one pipeline stage run the same program on tensors of the same shapes. Differences remain at the ends of the
other dimensions. The first tensor-parallel rank counts replicated tensors. A context-parallel rank's memory depends on
its chunks, and the first and the last rank differ most. ZeRO pads its last partition, and rank 0 writes files. So a
rehearsal runs two ranks of each stage, the first and the last along all other dimensions; the nearer one represents
each remaining rank. `megatron.rehearsal.matching` then verifies that they issue the same operations.

The null device writes one line of JSON per call (`megatron/rehearsal/null_device/`), which becomes a `CollectiveCall`.
The calls of a rank are translated for each rank that it represents: groups become the groups along the same mesh
dimensions, roots keep their position in the group, and peers keep their distance.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.distributed.mesh import DIMENSION_ORDER, Dimension, ParallelSizes
from megatron.utils.errors import RunError, UserError
from megatron.utils.formatting import format_ranks

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
            raise UserError(f"--ranks {outside[0]}: it must be from 0 to {sizes.world_size - 1}")
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
            raise UserError(f"--ranks {text!r}: it must be roles, all, or ranks such as 0,5,60-63")
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


POINT_TO_POINT = ("send", "recv")
WRAPPERS = ("megatron/distributed/sharding.py", "megatron/distributed/process_groups.py")
"""Project files that issue collectives on behalf of their callers."""


@dataclass(frozen=True)
class Communicator:
    """NCCL communicator: a group of ranks."""

    ranks: tuple[int, ...]
    number: int = 0
    """Index among the groups with identical ranks, in order of creation; equal on all members."""

    def describe(self, sizes: ParallelSizes | None = None) -> str:
        """Describe the ranks and the mesh dimensions along which they differ."""
        text = format_ranks(self.ranks)
        if sizes is None:
            return f"ranks {text}"
        along = find_varying_dimensions(sizes, self.ranks)
        names = " × ".join(name for name in ("tensor", "pipeline", "context", "data") if name in along)
        return f"{names or 'single'} group of ranks {text}"


@dataclass(frozen=True)
class CollectiveCall:
    """One NCCL call."""

    operation: str
    """One of all_reduce, all_gather, reduce_scatter, broadcast, reduce, send or recv."""
    communicator: Communicator
    count: int
    """Number of elements, as NCCL counts them: elements that each rank contributes; for all_gather, the size of one
    shard."""
    dtype: str
    bytes: int
    peer: int | None = None
    """Root, or the other side of a send or recv, as a rank of the run."""
    reduction: str | None = None
    batch: int | None = None
    """Number shared by the calls that a rank issued together (`ncclGroupStart`)."""
    where: tuple[str, ...] = ()
    """Project lines that led to the call, innermost first, as "file:line function"."""
    is_on_host: bool = False
    """True if the call runs over gloo and exchanges numbers or objects of the host."""

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in POINT_TO_POINT

    @property
    def signature(self) -> tuple[str, int, str, int | None, str | None]:
        """Properties on which all members of a group must agree."""
        return (self.operation, self.count, self.dtype, self.peer, self.reduction)

    def describe(self) -> str:
        """Describe the call, for example `all_reduce of 1,024 float32 (megatron/model/attention.py:88)`."""
        return f"{self.describe_operation()}{f' ({self.line})' if self.where else ''}"

    @property
    def line(self) -> str:
        """Line that issued the call: the innermost one outside the wrappers of torch.distributed."""
        return next((line for line in self.where if not line.startswith(WRAPPERS)), self.where[0]) if self.where else ""

    def describe_operation(self) -> str:
        """Describe the call without the line that issued it."""
        reduction = f" {self.reduction}" if self.reduction not in (None, "sum") else ""
        direction = {"send": "to", "recv": "from"}.get(self.operation, "root")
        peer = "" if self.peer is None else f" {direction} rank {self.peer}"
        if not self.dtype:  # an object of the host
            return f"{self.operation}{peer}"
        return f"{self.operation}{reduction} of {self.count:,} {self.dtype}{peer}"


@dataclass(frozen=True)
class Ledger:
    """All calls of one rank."""

    rank: int
    calls: tuple[CollectiveCall, ...]

    def translate(self, target: int, sizes: ParallelSizes) -> "Ledger":
        """Return the calls of another rank of the same pipeline stage that issues the same operations."""
        if target == self.rank:
            return self
        communicators: dict[Communicator, Communicator] = {}
        peers: dict[tuple[Communicator, int, bool], int] = {}
        calls = []
        for call in self.calls:
            communicator = call.communicator
            if communicator not in communicators:
                ranks = translate_group(sizes, communicator.ranks, self.rank, target)
                communicators[communicator] = Communicator(ranks, communicator.number)
            peer = call.peer
            if peer is not None:
                key = (communicator, peer, call.is_point_to_point)
                if key not in peers:
                    along = find_varying_dimensions(sizes, communicator.ranks)
                    peers[key] = translate_rank(
                        sizes, peer, self.rank, target, along, is_relative=call.is_point_to_point
                    )
                peer = peers[key]
            calls.append(replace(call, communicator=communicators[communicator], peer=peer))
        return Ledger(target, tuple(calls))

    def normalize(self, sizes: ParallelSizes) -> tuple[Any, ...]:
        """Return the calls without rank numbers.

        The result is equal for two ranks of a stage that issue the same operations.
        """
        first = _find_first_of_stage(sizes, self.rank)
        return tuple((call.signature, call.communicator) for call in self.translate(first, sizes).calls)


def _find_first_of_stage(sizes: ParallelSizes, rank: int) -> int:
    per_stage = sizes.world_size // sizes.pipeline
    return rank // per_stage * per_stage


def read_ledger(path: Path, rank: int) -> Ledger:
    """Read the calls that the null device recorded for a rank; empty if there is no file, as without NCCL.

    Raises:
        RunError: if the file is damaged, for example because the process was killed while it wrote.
    """
    if not path.is_file():
        return Ledger(rank, ())
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return Ledger(rank, tuple(parse_calls(map(json.loads, lines))))
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path}: not a ledger of NCCL calls ({error})") from None


def parse_calls(entries: Iterable[dict[str, Any]]) -> Iterator[CollectiveCall]:
    """Parse entries written by `null_device/recorder.py`.

    They are definitions of named groups, and operations on those groups.
    """
    entries = list(entries)
    named = [(entry["group"], tuple(sorted(entry["ranks"]))) for entry in entries if "op" not in entry]
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    # torch numbers groups in order of creation, which is the same on all members; the recorder logs them on first use.
    for name, ranks in sorted(named, key=lambda group: (len(group[0]), group[0])):
        by_ranks.setdefault(ranks, []).append(name)
    communicators = {
        name: Communicator(ranks, number) for ranks, names in by_ranks.items() for number, name in enumerate(names)
    }
    for entry in entries:
        if "op" not in entry:
            continue
        yield CollectiveCall(
            operation=entry["op"],
            communicator=communicators[entry["group"]],
            count=entry.get("count", 0),
            dtype=entry.get("dtype", ""),
            bytes=entry.get("bytes", 0),
            peer=entry.get("peer"),
            reduction=entry.get("reduction"),
            batch=entry.get("batch"),
            where=tuple(entry.get("where", ())),
            is_on_host=entry.get("device") == "cpu",
        )
