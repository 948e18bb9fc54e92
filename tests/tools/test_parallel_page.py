"""The picture of docs/parallel.md says what the mesh says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import draw_parallel

from megatron.distributed.mesh import Mesh


def test_the_drawn_holders_are_the_groups_of_the_mesh() -> None:
    mesh = Mesh(draw_parallel.SHOWN, draw_parallel.SIZES)
    same_weights = draw_parallel.holders(tensor=mesh.tensor.index, stage=mesh.pipeline.index)
    assert tuple(same_weights) == mesh.list_members("context", "data") == (1, 3, 5, 7)
    same_tokens = draw_parallel.holders(data=mesh.data.index, place=0)
    assert tuple(same_tokens) == mesh.list_members("tensor", "pipeline") == (4, 5, 12, 13)
    assert draw_parallel.holders(data=mesh.data.index, place=7) == same_tokens  # from either end


def test_the_picture_is_the_same_each_time() -> None:
    first = draw_parallel.png()
    assert first.startswith(b"\x89PNG")
    assert first == draw_parallel.png()
