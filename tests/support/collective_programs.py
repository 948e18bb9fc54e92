"""NCCL calls of a mesh's ranks in training with all four parallel dimensions, defined rank by rank.

They do not come from a run: each rank's calls are derived from its own coordinates, so that a rehearsal's translation
of another rank's calls can be compared with them.
"""

from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.rehearsal.roles import CollectiveCall, Communicator, Ledger

LINE = "megatron/training/engine.py:1"


def write_ledger(rank: int, sizes: ParallelSizes, *, layers: int = 2, micro_batches: int = 2) -> Ledger:
    """Return a rank's calls in one step.

    They are sums within layers, exchange of keys and values, messages between stages, ZeRO's reductions to every owner,
    and a broadcast from the first rank.
    """
    mesh = Mesh(rank, sizes)
    world, shards = tuple(range(sizes.world_size)), mesh.list_members("context", "data")
    calls: list[CollectiveCall] = []

    def add(operation: str, ranks: tuple[int, ...], count: int, peer: int | None = None, number: int = 0) -> None:
        if len(ranks) > 1:
            calls.append(
                CollectiveCall(
                    operation, Communicator(ranks, number), count, "bfloat16", 2 * count, peer, where=(LINE,)
                )
            )

    stages, stage = mesh.list_members("pipeline"), mesh.pipeline.index
    ring = mesh.list_members("context")
    add("broadcast", world, 7, 0)
    for _ in range(micro_batches):
        if stage > 0:
            add("recv", stages, 64, stages[stage - 1])
        for _ in range(layers):
            add("all_reduce", mesh.list_members("tensor"), 512)
            add("all_gather", ring, 256)
            place = ring.index(rank)
            if len(ring) > 2:
                add("send", ring, 128, ring[(place + 1) % len(ring)])
                add("recv", ring, 128, ring[place - 1])
        if stage < sizes.pipeline - 1:
            add("send", stages, 64, stages[stage + 1])
    for owner in shards:
        add("reduce", shards, 1024, owner, number=1)
    if stage in (0, sizes.pipeline - 1) and sizes.pipeline > 1:
        add("all_reduce", (stages[0], stages[-1]), 2048)
    add("all_reduce", mesh.list_members("tensor", "pipeline"), 1)
    add("all_gather", shards, 4096, number=1)
    return Ledger(rank, tuple(calls))


def write_ledgers(sizes: ParallelSizes, **options: int) -> dict[int, Ledger]:
    """Return the calls of all ranks."""
    return {rank: write_ledger(rank, sizes, **options) for rank in range(sizes.world_size)}
