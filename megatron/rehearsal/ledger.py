"""What a rank asked of NCCL, in order, and the same as another rank would have asked it.

The null device writes a line of JSON for every call (`megatron/rehearsal/null_device/`). Here it becomes a
`CollectiveCall`. Ranks that one process stands for get a copy in which groups and peers are their own: the group along
the same dimensions of the mesh, the same place in it as root, the same distance from it as the other side.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.distributed.mesh import ParallelSizes
from megatron.rehearsal.roles import find_varying_dimensions, translate_group, translate_rank
from megatron.utils.errors import RunError
from megatron.utils.formatting import format_ranks

POINT_TO_POINT = ("send", "recv")
WRAPPERS = ("megatron/distributed/collectives.py", "megatron/distributed/process_groups.py")
"""Files of ours that issue collectives for others."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that NCCL joined."""

    ranks: tuple[int, ...]
    number: int = 0
    """Which of the groups of these very ranks, in the order in which they were made: the same on all members."""

    def describe(self, sizes: ParallelSizes | None = None) -> str:
        """Its ranks, and the dimensions of the mesh along which they differ."""
        text = format_ranks(self.ranks)
        if sizes is None:
            return f"ranks {text}"
        along = find_varying_dimensions(sizes, self.ranks)
        names = " × ".join(name for name in ("tensor", "pipeline", "context", "data") if name in along)
        return f"{names or 'single'} group of ranks {text}"


@dataclass(frozen=True)
class CollectiveCall:
    """One call of NCCL."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, broadcast, reduce, send or recv."""
    communicator: Communicator
    count: int
    """Elements, as NCCL counts them: of what a rank gives, or of an all_gather's part."""
    dtype: str
    bytes: int
    peer: int | None = None
    """The root, or the other side: a rank of the run."""
    reduction: str | None = None
    batch: int | None = None
    """Calls of a rank with the same number were handed over together (`ncclGroupStart`)."""
    where: tuple[str, ...] = ()
    """Lines of ours that led to it, the innermost first: file:line function."""
    is_on_host: bool = False
    """Over gloo: numbers and objects of the host."""

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in POINT_TO_POINT

    @property
    def signature(self) -> tuple[str, int, str, int | None, str | None]:
        """What all members of a group have to agree on."""
        return (self.operation, self.count, self.dtype, self.peer, self.reduction)

    def describe(self) -> str:
        """`all_reduce of 1,024 float32 (megatron/model/attention.py:88)`."""
        return f"{self.describe_operation()}{f' ({self.line})' if self.where else ''}"

    @property
    def line(self) -> str:
        """The line that issued it: the innermost that is no wrapper of torch.distributed."""
        return next((line for line in self.where if not line.startswith(WRAPPERS)), self.where[0]) if self.where else ""

    def describe_operation(self) -> str:
        """The same without the line that issued it."""
        reduction = f" {self.reduction}" if self.reduction not in (None, "sum") else ""
        direction = {"send": "to", "recv": "from"}.get(self.operation, "root")
        peer = "" if self.peer is None else f" {direction} rank {self.peer}"
        if not self.dtype:  # an object
            return f"{self.operation}{peer}"
        return f"{self.operation}{reduction} of {self.count:,} {self.dtype}{peer}"


@dataclass(frozen=True)
class Ledger:
    """All calls of a rank."""

    rank: int
    calls: tuple[CollectiveCall, ...]

    def translate(self, target: int, sizes: ParallelSizes) -> "Ledger":
        """The calls of another rank of the same pipeline stage that issues the same operations."""
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
        """The calls without saying whose they are: equal for two ranks of a stage that issue the same operations."""
        first = _find_first_of_stage(sizes, self.rank)
        return tuple((call.signature, call.communicator) for call in self.translate(first, sizes).calls)


def _find_first_of_stage(sizes: ParallelSizes, rank: int) -> int:
    per_stage = sizes.world_size // sizes.pipeline
    return rank // per_stage * per_stage


def read_ledger(path: Path, rank: int) -> Ledger:
    """The calls that the null device wrote down for a rank; none if there is no file, as without NCCL.

    Raises RunError: the file is damaged, as by a process that was killed while it wrote.
    """
    if not path.is_file():
        return Ledger(rank, ())
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return Ledger(rank, tuple(parse_calls(map(json.loads, lines))))
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path}: is not a ledger of NCCL calls ({error})") from None


def parse_calls(entries: Iterable[dict[str, Any]]) -> Iterator[CollectiveCall]:
    """Calls of entries as `null_device/recorder.py` writes them: groups by their names, and operations in them."""
    entries = list(entries)
    named = [(entry["group"], tuple(sorted(entry["ranks"]))) for entry in entries if "op" not in entry]
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    # torch numbers groups as they are made, which is the same order on all members; they are told as they are used.
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
