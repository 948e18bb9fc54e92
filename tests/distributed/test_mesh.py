"""Coordinates and groups, compared with direct counting and with megatron-core, in a single process."""

from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.distributed.mesh import (
    DIMENSION_ORDER,
    Axis,
    Mesh,
    ParallelSizes,
    get_pipeline_layer_range,
    list_chunk_owners,
    list_context_chunks,
)
from megatron.distributed.process_groups import parallel_state

CORE = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}

small = st.integers(1, 4)
meshes = st.builds(ParallelSizes, tensor=small, context=small, data=small, pipeline=small)
chosen = st.sets(st.sampled_from(DIMENSION_ORDER), min_size=1).map(lambda names: tuple(sorted(names)))


def points(sizes: ParallelSizes) -> list[dict[str, int]]:
    """Return the coordinates of every rank by counting: pipeline stages outermost, tensor ranks innermost."""
    ranges = [range(n) for n in (sizes.pipeline, sizes.data, sizes.context, sizes.tensor)]
    return [dict(zip(("pipeline", "data", "context", "tensor"), point, strict=True)) for point in product(*ranges)]


@given(meshes)
def test_coordinates_match_explicit_counts(sizes: ParallelSizes) -> None:
    counted = points(sizes)
    assert sizes.world_size == len(counted)
    for rank, point in enumerate(counted):
        assert sizes.get_coordinates(rank) == point
        mesh = Mesh(rank, sizes)
        for name in DIMENSION_ORDER:
            assert getattr(mesh, name) == mesh.get_axis(name) == Axis(point[name], getattr(sizes, name))


@given(meshes, chosen)
def test_groups_differ_in_their_dimensions_alone(sizes: ParallelSizes, dimensions: tuple) -> None:
    counted = points(sizes)

    def alike(one: int, other: int) -> bool:
        return all(counted[one][name] == counted[other][name] for name in DIMENSION_ORDER if name not in dimensions)

    for rank in range(sizes.world_size):
        mesh = Mesh(rank, sizes)
        members = tuple(other for other in range(sizes.world_size) if alike(rank, other))
        assert mesh.list_members(*dimensions) == members
        assert mesh.get_axis(*dimensions) == Axis(members.index(rank), len(members))
    assert sorted(rank for group in sizes.list_groups(*dimensions) for rank in group) == list(range(sizes.world_size))


@given(meshes, chosen)
def test_groups_match_megatron_core(sizes: ParallelSizes, dimensions: tuple) -> None:
    core = parallel_state.RankGenerator(
        tp=sizes.tensor, ep=1, dp=sizes.data, pp=sizes.pipeline, cp=sizes.context, order="tp-cp-ep-dp-pp"
    )
    theirs = core.get_ranks("-".join(CORE[name] for name in dimensions))
    assert sorted(sizes.list_groups(*dimensions)) == sorted(tuple(group) for group in theirs)


@given(meshes)
def test_each_token_is_counted_once(sizes: ParallelSizes) -> None:
    """Each rank of data × context has its own tokens; the other ranks have copies."""
    counted = points(sizes)
    tokens = {(d, c): 10 * d + c + 1 for d in range(sizes.data) for c in range(sizes.context)}
    held = [tokens[point["data"], point["context"]] for point in counted]
    assert sum(Mesh(rank, sizes).count_on_one_rank(n) for rank, n in enumerate(held)) == sum(tokens.values())
    for rank, n in enumerate(held):
        assert Mesh(rank, sizes).count_on_one_rank(float(n)) in (0.0, float(n))
    first = [rank for rank in range(sizes.world_size) if Mesh(rank, sizes).dp_cp.index == 0]
    assert sum(Mesh(rank, sizes).count_on_one_rank(1) for rank in first) == 1


@given(meshes)
def test_remaining_ranks_are_data_parallel(sizes: ParallelSizes) -> None:
    assert sizes == ParallelSizes.from_world_size(
        sizes.world_size, tensor=sizes.tensor, context=sizes.context, pipeline=sizes.pipeline
    )


def test_invalid_meshes_are_rejected() -> None:
    with pytest.raises(ValueError, match="6 ranks are not divisible by tensor 2 × context 1 × pipeline 2 = 4"):
        ParallelSizes.from_world_size(6, tensor=2, pipeline=2)
    for wrong in (
        lambda: ParallelSizes(data=0),
        lambda: Mesh(4, ParallelSizes(data=4)),
        lambda: Axis(2, 2),
        lambda: Axis(-1, 2),
    ):
        with pytest.raises(ValueError, match=r" is 0|rank 4 of 4|index -?[12] of 2"):
            wrong()


# Layers of a pipeline stage.


@given(st.integers(1, 40), st.data())
def test_stages_divide_the_layers_in_order_and_evenly(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    parts = [get_pipeline_layer_range(layers, Axis(stage, stages)) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    counts = [len(part) for part in parts]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] in (0, 1)


@pytest.mark.parametrize(("stage", "expected"), [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6])])
def test_an_uneven_division(stage: int, expected: list[int]) -> None:
    assert list(get_pipeline_layer_range(7, Axis(stage, 3))) == expected


# Chunks of a context-parallel rank: each position once, and the same number of scores for every rank.


@given(st.integers(1, 8), st.integers(1, 20))
def test_chunks_cover_each_position_once_with_equal_work(ranks: int, size: int) -> None:
    length = 2 * ranks * size
    places = [
        [place for start, n in list_context_chunks(length, Axis(rank, ranks)) for place in range(start, start + n)]
        for rank in range(ranks)
    ]
    assert sorted(chain(*places)) == list(range(length))
    scores = {sum(place + 1 for place in mine) for mine in places}
    assert len(scores) == 1  # a causal row sees its own position and all earlier ones
    assert [places[rank][number * size] for rank, number in list_chunk_owners(ranks)] == (
        list(range(0, length, size)) if ranks > 1 else [0]
    )


def test_indivisible_lengths_are_rejected() -> None:
    assert list_context_chunks(7, Axis()) == ((0, 7),)
    with pytest.raises(ValueError, match="a sequence of 12 tokens is not divisible into 8 chunks"):
        list_context_chunks(12, Axis(0, 4))
