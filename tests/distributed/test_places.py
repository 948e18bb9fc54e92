"""The chunks of a sequence that context-parallel ranks hold: each place once, and as many scores for every rank."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.distributed.mesh import Axis, list_chunk_owners, list_context_chunks


@given(st.integers(1, 8), st.integers(1, 20))
def test_ranks_together_hold_every_place_once_and_share_the_work(ranks: int, size: int) -> None:
    length = 2 * ranks * size
    places = [
        [place for start, n in list_context_chunks(length, Axis(rank, ranks)) for place in range(start, start + n)]
        for rank in range(ranks)
    ]
    assert sorted(chain(*places)) == list(range(length))
    scores = {sum(place + 1 for place in mine) for mine in places}
    assert len(scores) == 1  # a causal row sees its own place and all before it
    assert [places[rank][number * size] for rank, number in list_chunk_owners(ranks)] == (
        list(range(0, length, size)) if ranks > 1 else [0]
    )


def test_a_length_that_does_not_divide_is_refused() -> None:
    assert list_context_chunks(7, Axis()) == ((0, 7),)
    with pytest.raises(ValueError, match="a sequence of 12 tokens does not divide into 8 chunks"):
        list_context_chunks(12, Axis(0, 4))
