"""Check that the ranks of a run agree on what they communicate.

If they disagree, a real run hangs or computes wrong sums.

    in every group      all members issue the same operations, sizes, types, reductions and roots, in the same order
    between two ranks   each send matches a receive with the same number of elements and type, in the same order
    across groups       no ranks wait for each other in a cycle. The calls are replayed as if each had to complete
    before
                        its rank issues the next one; NCCL requires this order if communicators share ranks

A mismatch that several groups repeat is reported once.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.distributed.mesh import ParallelSizes
from megatron.rehearsal.roles import CollectiveCall, Communicator, Ledger
from megatron.utils.formatting import format_ranks

LedgersByRank = Mapping[int, Ledger]


@dataclass(frozen=True)
class Mismatch:
    """Disagreement between ranks about their communication."""

    kind: str
    """One of skipped, extra, order, differs, send, recv or deadlock."""
    ranks: tuple[int, ...]
    """Ranks that deviate from the rest of their group."""
    communicator: Communicator
    index: int
    """Index from 0 among the group's calls, or among the calls between two ranks in one direction."""
    message: str
    """Message that compares the deviating ranks with the others, with operations and source lines."""

    def describe(self, sizes: ParallelSizes | None = None) -> str:
        subject = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {format_ranks(self.ranks)}"
        return f"{subject}, {self.communicator.describe(sizes)}, call {self.index + 1}: {self.message}"


def find_mismatches(ledgers: LedgersByRank, sizes: ParallelSizes | None = None) -> list[Mismatch]:
    """Find all mismatches between ranks; report a mismatch that several groups repeat once.

    Args:
        ledgers: known ledgers; calls of other ranks are not compared.
        sizes: mesh sizes. If given, equal mismatches of groups along the same dimensions are merged.
    """
    calls: dict[Communicator, dict[int, list[CollectiveCall]]] = defaultdict(dict)
    for rank, ledger in ledgers.items():
        for call in ledger.calls:
            calls[call.communicator].setdefault(rank, []).append(call)
    mismatches: list[Mismatch] = []
    for communicator, by_rank in calls.items():
        members = [rank for rank in communicator.ranks if rank in ledgers]
        collectives = {rank: [c for c in by_rank.get(rank, ()) if not c.is_point_to_point] for rank in members}
        mismatches += _match_collectives(communicator, collectives)
        mismatches += _match_point_to_point(communicator, by_rank, set(members))
    if not mismatches and (deadlock := find_deadlock(ledgers)) is not None:
        mismatches.append(deadlock)
    return _merge_repeated(mismatches)


def _match_collectives(communicator: Communicator, calls: Mapping[int, Sequence[CollectiveCall]]) -> Iterable[Mismatch]:
    """Yield the first difference of each rank from the majority of the group."""
    sequences = {rank: tuple(call.signature for call in own) for rank, own in calls.items()}
    counts = Counter(sequences.values())
    if len(counts) < 2:
        return
    # If two sequences are equally frequent, compare with the first rank's.
    expected = max(counts, key=lambda sequence: (counts[sequence], sequence == next(iter(sequences.values()))))
    model = next(rank for rank, sequence in sequences.items() if sequence == expected)
    others = [rank for rank, sequence in sequences.items() if sequence == expected]
    for sequence in counts:
        if sequence == expected:
            continue
        ranks = tuple(rank for rank, own in sequences.items() if own == sequence)
        yield _describe_difference(communicator, ranks, calls[ranks[0]], others, calls[model])


def _describe_difference(
    communicator: Communicator,
    ranks: tuple[int, ...],
    own: Sequence[CollectiveCall],
    others: Sequence[int],
    expected: Sequence[CollectiveCall],
) -> Mismatch:
    length = min(len(own), len(expected))
    index = next((i for i in range(length) if own[i].signature != expected[i].signature), length)
    rest, rest_expected = own[index:], expected[index:]
    they = f"rank {others[0]}" if len(others) == 1 else f"ranks {format_ranks(others)}"
    if not rest:
        missing = f"{they} issue{'s' if len(others) == 1 else ''} {rest_expected[0].describe()}"
        what = f"no more calls, but {missing} ({len(own)} calls against {len(expected)})"
        return Mismatch("skipped", ranks, communicator, index, what)
    if not rest_expected:
        what = f"{rest[0].describe()}, but {they} issue{'s' if len(others) == 1 else ''} no more calls"
        return Mismatch("extra", ranks, communicator, index, what)
    (mine, theirs) = (rest[0], rest_expected[0])
    after, after_expected = ([call.signature for call in calls[1:3]] for calls in (rest, rest_expected))
    if after[:1] == [theirs.signature] and after_expected[:1] == [mine.signature]:
        what = f"{mine.describe()} before {theirs.describe_operation()}; {they} issue them in reverse order"
        return Mismatch("order", ranks, communicator, index, f"{what} ({theirs.line})")
    if mine.signature in after_expected[:1] and len(rest) < len(rest_expected):
        what = f"skips {theirs.describe()}, which {they} issue{'s' if len(others) == 1 else ''}"
        return Mismatch("skipped", ranks, communicator, index, what)
    if theirs.signature in after[:1] and len(rest) > len(rest_expected):
        what = f"{mine.describe()}, which {they} do{'es' if len(others) == 1 else ''} not issue"
        return Mismatch("extra", ranks, communicator, index, what)
    what = f"{mine.describe()}, but {they} issue{'s' if len(others) == 1 else ''} {theirs.describe()}"
    return Mismatch("differs", ranks, communicator, index, what)


def _match_point_to_point(
    communicator: Communicator, calls: Mapping[int, Sequence[CollectiveCall]], known: set[int]
) -> Iterable[Mismatch]:
    """Match each send with the receive of its peer, in order."""
    sent: dict[tuple[int, int], list[CollectiveCall]] = defaultdict(list)
    received: dict[tuple[int, int], list[CollectiveCall]] = defaultdict(list)
    for rank, own in calls.items():
        for call in own:
            if call.operation == "send" and call.peer in known:
                sent[rank, call.peer].append(call)
            elif call.operation == "recv" and call.peer in known:
                received[call.peer, rank].append(call)
    for source, target in sorted({*sent, *received}):
        sends, receives = sent[source, target], received[source, target]
        length = min(len(sends), len(receives))
        index = next(
            (i for i in range(length) if (sends[i].count, sends[i].dtype) != (receives[i].count, receives[i].dtype)),
            length,
        )
        if index < length:
            what = f"{sends[index].describe()}, but rank {target} posts {receives[index].describe()}"
            yield Mismatch("differs", (source,), communicator, index, what)
        elif len(sends) > index:
            what = f"{sends[index].describe()}, which rank {target} never receives"
            yield Mismatch("send", (source,), communicator, index, what)
        elif len(receives) > index:
            what = f"{receives[index].describe()}, which rank {source} never sends"
            yield Mismatch("recv", (target,), communicator, index, what)


def find_deadlock(ledgers: LedgersByRank) -> Mismatch | None:
    """Replay the calls of all ranks; return the first rank that waits forever, or None.

    A collective completes when all members have reached it, and a receive when its message was sent. A send does not
    wait. Calls issued together wait together. Unknown members count as always ready.
    """
    batches = {rank: _group_batches(ledger.calls) for rank, ledger in ledgers.items()}
    positions = dict.fromkeys(ledgers, 0)
    arrived: Counter[tuple[Communicator, int]] = Counter()
    """Number of ranks that have reached the n-th collective of a group."""
    issued: Counter[tuple[Communicator, int]] = Counter()
    """Number of a group's collectives that a rank has started."""
    sent: Counter[tuple[Communicator, int, int]] = Counter()
    received: Counter[tuple[Communicator, int, int]] = Counter()
    needed = {
        c.communicator: sum(r in ledgers for r in c.communicator.ranks)
        for ledger in ledgers.values()
        for c in ledger.calls
    }
    waiting: dict[int, list[tuple[CollectiveCall, int]]] = {}

    def begin(rank: int) -> None:
        calls = []
        for call in batches[rank][positions[rank]]:
            key = call.communicator
            if call.operation == "send":
                sent[key, rank, call.peer or 0] += 1
            elif call.operation == "recv":
                received[key, call.peer or 0, rank] += 1
                calls.append((call, received[key, call.peer or 0, rank]))
            else:
                index = issued[key, rank]
                issued[key, rank] += 1
                arrived[key, index] += 1
                calls.append((call, index))
        waiting[rank] = calls

    def is_over(rank: int) -> bool:
        for call, index in waiting[rank]:
            key = call.communicator
            if call.operation == "recv":
                if call.peer in ledgers and sent[key, call.peer or 0, rank] < index:
                    return False
            elif arrived[key, index] < needed[key]:
                return False
        return True

    ready = {rank for rank in ledgers if batches[rank]}
    for rank in ready:
        begin(rank)
    pending = ready
    while pending:
        done = {rank for rank in pending if is_over(rank)}
        if not done:
            break
        for rank in done:
            positions[rank] += 1
            if positions[rank] < len(batches[rank]):
                begin(rank)
            else:
                pending = pending - {rank}
    if not pending:
        return None
    return _describe_deadlock(pending, waiting, arrived, needed, issued, ledgers)


def _group_batches(calls: Sequence[CollectiveCall]) -> list[list[CollectiveCall]]:
    batches: list[list[CollectiveCall]] = []
    for call in calls:
        if batches and call.batch is not None and batches[-1][0].batch == call.batch:
            batches[-1].append(call)
        else:
            batches.append([call])
    return batches


def _describe_deadlock(
    pending: set[int],
    waiting: Mapping[int, Sequence[tuple[CollectiveCall, int]]],
    arrived: Mapping[tuple[Communicator, int], int],
    needed: Mapping[Communicator, int],
    issued: Mapping[tuple[Communicator, int], int],
    ledgers: LedgersByRank,
) -> Mismatch:
    """Describe the ranks that wait for each other in a cycle, and the calls in which they wait."""

    def find_blocked(rank: int) -> tuple[CollectiveCall, int, int]:
        """Return the call that a rank is waiting in, its index among the group's calls, and the rank it waits for."""
        for call, index in waiting[rank]:
            if call.operation == "recv":
                if call.peer in pending:
                    return call, index - 1, call.peer
            elif arrived[call.communicator, index] < needed[call.communicator]:
                members = (r for r in call.communicator.ranks if r in ledgers)
                return call, index, next(r for r in members if issued[call.communicator, r] <= index)
        call, index = waiting[rank][0]
        return call, index, rank

    rank, path = min(pending), list[int]()
    while rank not in path:
        path.append(rank)
        following = find_blocked(rank)[2]
        if following not in pending:  # it has completed
            break
        rank = following
    circle = tuple(path[path.index(rank) :]) if rank in path else tuple(path)
    call, index, _ = find_blocked(circle[0])
    steps = [f"rank {member} waits in {find_blocked(member)[0].describe()}" for member in circle[:4]]
    what = "; ".join(steps) + ("; …" if len(circle) > 4 else "") + f"; back to rank {find_blocked(circle[-1])[2]}"
    return Mismatch("deadlock", circle, call.communicator, index, f"ranks wait for each other: {what}")


def _merge_repeated(mismatches: Sequence[Mismatch]) -> list[Mismatch]:
    """Merge equal mismatches of groups of equal size into one that states the number of other groups."""
    groups: dict[tuple[object, ...], list[Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        shape = (mismatch.kind, len(mismatch.communicator.ranks), mismatch.index, _drop_ranks(mismatch.message))
        groups[shape].append(mismatch)
    merged = []
    for first, *others in groups.values():
        more = "" if not others else f" (and {len(others)} similar mismatches, the first on rank {others[0].ranks[0]})"
        merged.append(Mismatch(first.kind, first.ranks, first.communicator, first.index, first.message + more))
    return merged


def _drop_ranks(message: str) -> str:
    return re.sub(r"(root|to|from) rank \d+|ranks? [\d,…-]+", "", message)
