"""Faults planted in a rank's calls are found, with rank, group, operation and line."""

import random
from dataclasses import replace

import pytest

from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.rehearsal.matching import find_deadlock, find_mismatches
from megatron.rehearsal.roles import CollectiveCall, Communicator, Ledger
from tests.support.collective_programs import LINE, write_ledgers

SIZES = ParallelSizes(tensor=2, context=4, data=2, pipeline=2)
FAULTY = 5
"""Rank whose calls are modified."""


def find_call(ledger, operation, ranks=None):
    """Return the index of the second call of an operation (in a group)."""
    indices = [
        index
        for index, call in enumerate(ledger.calls)
        if call.operation == operation and ranks in (None, call.communicator.ranks)
    ]
    return indices[min(1, len(indices) - 1)]


def with_fault(ledgers, change):
    """Return the ledgers with the calls of one rank modified in place by `change`."""
    calls = list(ledgers[FAULTY].calls)
    change(calls)
    return {**ledgers, FAULTY: Ledger(FAULTY, tuple(calls))}


@pytest.mark.parametrize("seed", range(12))
def test_correct_runs_have_no_faults(seed):
    generator = random.Random(seed)
    sizes = ParallelSizes(*(generator.choice((1, 2, 3, 4)) for _ in range(4)))
    ledgers = write_ledgers(sizes, layers=generator.randint(1, 3), micro_batches=generator.randint(1, 3))
    assert find_mismatches(ledgers, sizes) == []
    known = generator.sample(sorted(ledgers), max(1, len(ledgers) // 2))
    assert find_mismatches({rank: ledgers[rank] for rank in known}, sizes) == []


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce", "broadcast"])
def test_a_rank_that_skips_a_collective(operation):
    ledgers = write_ledgers(SIZES)
    index = find_call(ledgers[FAULTY], operation)
    skipped = ledgers[FAULTY].calls[index]
    (found,) = find_mismatches(with_fault(ledgers, lambda calls: calls.pop(index)), SIZES)
    assert FAULTY in found.ranks or len(skipped.communicator.ranks) == 2
    assert found.communicator == skipped.communicator
    assert operation in found.message
    assert LINE in found.message


def test_a_rank_with_another_type_size_or_root():
    ledgers = write_ledgers(SIZES)
    index = find_call(ledgers[FAULTY], "reduce")
    call = ledgers[FAULTY].calls[index]
    for changed in (
        replace(call, dtype="float32"),
        replace(call, count=call.count + 1),
        replace(call, peer=call.communicator.ranks[-1]),
        replace(call, reduction="max"),
        replace(call, operation="all_reduce", peer=None),
    ):

        def change(calls, changed=changed):
            calls[index] = changed

        (found,) = find_mismatches(with_fault(ledgers, change), SIZES)
        assert (found.kind, found.ranks, found.communicator) == ("differs", (FAULTY,), call.communicator)
        assert changed.describe() in found.message
        assert "ranks 1,3,7,9" in found.message
        assert call.describe() in found.message


def test_a_rank_with_another_order():
    ledgers = write_ledgers(SIZES)
    index = find_call(ledgers[FAULTY], "reduce")

    def swap(calls):
        calls[index], calls[index + 1] = calls[index + 1], calls[index]

    (found,) = find_mismatches(with_fault(ledgers, swap), SIZES)
    assert (found.kind, found.ranks) == ("order", (FAULTY,))
    assert "in reverse order" in found.message


def test_a_rank_with_an_extra_call_at_the_end():
    ledgers = write_ledgers(SIZES)
    last = ledgers[FAULTY].calls[-1]
    (found,) = find_mismatches(with_fault(ledgers, lambda calls: calls.append(last)), SIZES)
    assert (found.kind, found.ranks) == ("extra", (FAULTY,))
    assert "issue no more calls" in found.message


@pytest.mark.parametrize("operation", ["send", "recv"])
def test_a_send_or_receive_without_its_peer(operation):
    ledgers = write_ledgers(SIZES)
    index = find_call(ledgers[FAULTY], operation)
    missing = ledgers[FAULTY].calls[index]
    (found,) = find_mismatches(with_fault(ledgers, lambda calls: calls.pop(index)), SIZES)
    expected = {"send": ("recv", (missing.peer,), f"rank {FAULTY} never sends"),
                "recv": ("send", (missing.peer,), f"rank {FAULTY} never receives")}[operation]  # fmt: skip
    assert (found.kind, found.ranks) == expected[:2]
    assert expected[2] in found.message


def test_a_message_of_another_size():
    ledgers = write_ledgers(SIZES)
    index = find_call(ledgers[FAULTY], "send")

    def shrink(calls):
        calls[index] = replace(calls[index], count=3)

    (found,) = find_mismatches(with_fault(ledgers, shrink), SIZES)
    assert found.kind == "differs"
    assert "send of 3 bfloat16" in found.message
    assert "posts recv of 128 bfloat16" in found.message


def test_collectives_of_two_groups_in_another_order_deadlock():
    one, other = Communicator((0, 1)), Communicator((0, 1), 1)
    first, second = (
        CollectiveCall("all_reduce", group, 8, "float32", 32, where=(f"megatron/x.py:{line}",))
        for line, group in ((1, one), (2, other))
    )
    ledgers = {0: Ledger(0, (first, second)), 1: Ledger(1, (second, first))}
    (found,) = find_mismatches(ledgers)
    assert found.kind == "deadlock"
    assert "rank 0 waits in all_reduce of 8 float32 (megatron/x.py:1)" in found.message
    assert "rank 1 waits in all_reduce of 8 float32 (megatron/x.py:2)" in found.message


def test_two_ranks_that_receive_first_deadlock_unless_batched():
    pair = Communicator((0, 1))

    def exchange(rank, batch):
        receive, send = (
            CollectiveCall(operation, pair, 8, "float32", 32, peer=1 - rank, batch=batch)
            for operation in ("recv", "send")
        )
        return Ledger(rank, (receive, send))

    assert find_deadlock({rank: exchange(rank, None) for rank in (0, 1)}).kind == "deadlock"
    assert find_deadlock({rank: exchange(rank, 4) for rank in (0, 1)}) is None


def test_a_fault_of_several_groups_is_reported_once():
    ledgers = write_ledgers(SIZES)
    for rank in ledgers:
        if Mesh(rank, SIZES).context.index == 2:
            calls = list(ledgers[rank].calls)
            calls.pop(find_call(ledgers[rank], "all_gather"))
            ledgers[rank] = Ledger(rank, tuple(calls))
    (found,) = find_mismatches(ledgers, SIZES)
    assert found.kind == "skipped"
    assert "and 7 similar mismatches" in found.message
    assert found.describe(SIZES).startswith("rank 4, context group of ranks 0,2,4,6, call 4: no more calls, but ")
    assert "(3 calls against 4)" in found.message
