"""The picture of docs/parallel.md agrees with the mesh."""

from megatron.distributed.mesh import Mesh
from tools.docs import parallel_page


def test_the_drawn_holders_are_the_groups_of_the_mesh() -> None:
    mesh = Mesh(parallel_page.HIGHLIGHTED_GPU, parallel_page.SIZES)
    same_weights = parallel_page.list_storing_gpus(tensor=mesh.tensor.index, stage=mesh.pipeline.index)
    assert tuple(same_weights) == mesh.list_members("context", "data") == (1, 3, 5, 7)
    same_tokens = parallel_page.list_storing_gpus(data=mesh.data.index, position=0)
    assert tuple(same_tokens) == mesh.list_members("tensor", "pipeline") == (4, 5, 12, 13)
    assert parallel_page.list_storing_gpus(data=mesh.data.index, position=7) == same_tokens  # from either end


def test_the_picture_is_the_same_each_time() -> None:
    first = parallel_page.draw_picture()
    assert first.startswith(b"\x89PNG")
    assert first == parallel_page.draw_picture()
