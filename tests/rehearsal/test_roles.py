"""Ranks to run, and translation of their calls to the ranks they represent."""

import itertools
import json

import pytest

from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.rehearsal.roles import choose_roles, list_stages, parse_rank_selection, read_ledger
from megatron.utils.errors import RunError, UserError
from megatron.utils.formatting import format_ranks
from tests.support.collective_programs import write_ledger

MESHES = [ParallelSizes(*sizes) for sizes in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 2, 3))]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_two_ranks_of_each_stage_represent_the_others(sizes):
    roles = choose_roles(sizes)
    assert len(roles) <= 2 * sizes.pipeline
    assert roles[0].rank == 0, "rank 0 writes"
    stood_for = sorted(rank for role in roles for rank in role.represented_ranks)
    assert stood_for == list(range(sizes.world_size))
    for role in roles:
        assert role.rank in role.represented_ranks
        assert {Mesh(rank, sizes).pipeline.index for rank in role.represented_ranks} == {
            Mesh(role.rank, sizes).pipeline.index
        }
    ends = {(Mesh(role.rank, sizes).context.index, Mesh(role.rank, sizes).dp_cp.index) for role in roles}
    assert {(0, 0), (sizes.context - 1, sizes.context * sizes.data - 1)} <= ends


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_translated_calls_match_the_other_rank(sizes):
    for role in choose_roles(sizes):
        own = write_ledger(role.rank, sizes)
        for rank in role.represented_ranks:
            assert own.translate(rank, sizes) == write_ledger(rank, sizes)
    for stage in list_stages(sizes):
        assert len({write_ledger(rank, sizes).normalize(sizes) for rank in stage}) == 1


def test_ranks_are_chosen_by_hand():
    sizes = ParallelSizes(tensor=2, data=4, pipeline=2)
    assert [role.rank for role in choose_roles(sizes, "all")] == list(range(16))
    roles = choose_roles(sizes, [1, 6])
    assert [(role.rank, role.represented_ranks) for role in roles] == [(1, (0, 1, 3, 5, 7)), (6, (2, 4, 6))]
    assert choose_roles(sizes, [9])[0].represented_ranks == tuple(range(8, 16)), "stage 0 is stood for by nobody"
    assert choose_roles(sizes)[1].describe_coordinates(sizes) == "stage 0, data 3, tensor 1"
    with pytest.raises(UserError, match="--ranks 16: it must be from 0 to 15"):
        choose_roles(sizes, [3, 16])


def test_selection_of_ranks():
    assert parse_rank_selection("roles") == "roles"
    assert parse_rank_selection("all") == "all"
    assert parse_rank_selection("0, 5,60-62") == [0, 5, 60, 61, 62]
    for text in ("", "first", "3-1", "1,", "-2", "²", "0-20000000"):
        with pytest.raises(UserError, match="roles, all, or ranks such as"):
            parse_rank_selection(text)


def test_rank_lists_are_abbreviated():
    assert format_ranks(range(64)) == "0-63"
    assert format_ranks(range(0, 64, 4)) == "0,4,…,60"
    assert format_ranks([0, 1, 2, 5]) == "0-2,5"


def test_a_ledger_is_read_from_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    where = ["megatron/distributed/sharding.py:9 all_reduce_sum_", "megatron/model/attention.py:3 forward"]
    call = {"op": "broadcast", "group": "9", "count": 3, "dtype": "i64", "bytes": 24, "peer": 6, "where": where}
    lines = [
        {"group": "9", "ranks": [4, 6]},
        call | {"batch": 1, "device": "cuda"},
        {"group": "7", "ranks": [4, 6]},
        {"op": "all_gather_object", "group": "7", "batch": 2, "device": "cpu", "where": where[:1]},
        call | {"batch": 3, "device": "cuda"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    calls = read_ledger(path, 4).calls
    assert [call.communicator.number for call in calls] == [1, 0, 1], "another group of the same ranks is another group"
    assert [call.is_on_host for call in calls] == [False, True, False]
    assert (calls[0].peer, calls[0].communicator.ranks) == (6, (4, 6))
    assert calls[0].describe() == "broadcast of 3 i64 root rank 6 (megatron/model/attention.py:3 forward)"
    assert calls[1].describe() == "all_gather_object (megatron/distributed/sharding.py:9 all_reduce_sum_)"
    assert read_ledger(tmp_path / "none", 0).calls == ()
    path.write_text('{"op": "broadcast", "gro')
    with pytest.raises(RunError, match="not a ledger"):
        read_ledger(path, 4)
