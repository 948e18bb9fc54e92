"""NCCL calls of a rank in order, and their translation to other ranks.

The null device writes one line of JSON per call (`megatron/rehearsal/null_device/`). This module parses it into a
`CollectiveCall`. A rank that represents others is translated for each of them: groups become the groups along the same
mesh dimensions, roots keep their position in the group, and peers keep their distance.
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
