"""Which layers a pipeline stage holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.distributed.mesh import Axis, pipeline_layer_range


@given(st.integers(1, 40), st.data())
def test_stages_divide_the_layers_in_order_and_evenly(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    parts = [pipeline_layer_range(layers, Axis(stage, stages)) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    counts = [len(part) for part in parts]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] in (0, 1)


@pytest.mark.parametrize(("stage", "expected"), [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6])])
def test_an_uneven_division(stage: int, expected: list[int]) -> None:
    assert list(pipeline_layer_range(7, Axis(stage, 3))) == expected
