"""Any range of a parameter is found in whatever shards were written, and gaps are never filled."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from megatron.checkpoint import tensor_files
from megatron.checkpoint.engine_state import OptimizerShard
from megatron.checkpoint.sharded_state import ShardReader, describe_shards
from megatron.distributed.mesh import Axis
from megatron.distributed.sharding import ShardSpec, shard_tensor
from megatron.utils.errors import RunError

KIND = "exp_avg"


def divided(whole: Tensor, how: ShardSpec | None, tensor: Axis) -> nn.Parameter:
    """Return the shard of a tensor-parallel rank, with megatron-core's attributes."""
    parameter = nn.Parameter(whole if how is None else shard_tensor(whole, how, tensor))
    if how is not None:
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = how.dim, how.num_strips
    return parameter


def fragment(parameter: nn.Parameter, start: int, stop: int) -> OptimizerShard:
    flat = parameter.detach().reshape(-1)[start:stop]
    return OptimizerShard("weight", parameter, start, flat, {KIND: flat}, torch.tensor(3.0))


def write(folder: Path, whole: Tensor, how: ShardSpec | None, ranks: int, cuts: list[int]) -> list[Path]:
    """Write one file for each tensor-parallel rank and each range between two cuts of its shard."""
    files = []
    for index in range(ranks):
        tensor = Axis(index, ranks)
        parameter = divided(whole, how, tensor)
        ends = sorted({0, parameter.numel(), *(each % parameter.numel() for each in cuts)})
        for start, stop in pairwise(ends):
            held = fragment(parameter, start, stop)
            path = folder / f"{index}_{start}.safetensors"
            tensor_files.write_tensors(path, {f"{KIND}/weight": held.moments[KIND]}, describe_shards([held], tensor))
            files.append(path)
        if how is None:
            break
    return files


@some.composite
def layouts(draw: some.DrawFn) -> tuple[tuple[int, ...], ShardSpec | None, int, int]:
    """Draw a shape, its sharding, and the numbers of ranks before and after."""
    before, after = draw(some.sampled_from([1, 2, 3, 4])), draw(some.sampled_from([1, 2, 3, 4]))
    how = draw(some.none() | some.builds(ShardSpec, some.integers(0, 1), some.integers(1, 2)))
    shape = [draw(some.integers(1, 3)), draw(some.integers(1, 3))]
    if how is not None:
        shape[how.dim] *= how.num_strips * 12
    return (shape[0], shape[1]), how, before, after


@given(layout=layouts(), cuts=some.lists(some.integers(0, 10**6), max_size=4), data=some.data())
def test_any_range_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[tuple[int, ...], ShardSpec | None, int, int],
    cuts: list[int],
    data: some.DataObject,
) -> None:
    shape, how, before, after = layout
    whole = torch.randn(shape)
    files = write(tmp_path_factory.mktemp("pieces"), whole, how, before, cuts)
    with ShardReader(data.draw(some.permutations(files))) as pieces:
        assert pieces.list_names() == ["weight"]
        assert pieces.get_shape("weight") == shape
        assert pieces.get_step("weight") == 3
        assert torch.equal(pieces.read_tensor(KIND, "weight"), whole)
        for index in range(after):
            tensor = Axis(index, after)
            expected = divided(whole, how, tensor).detach().reshape(-1)
            start, stop = sorted(data.draw(some.tuples(*[some.integers(0, expected.numel())] * 2)))
            assert torch.equal(pieces.read_range(KIND, "weight", how, tensor, start, stop), expected[start:stop])


@pytest.mark.parametrize("how", [None, ShardSpec(0, 1)])
def test_a_gap_is_reported(tmp_path: Path, how: ShardSpec | None) -> None:
    files = write(tmp_path, torch.randn(8, 3), how, 2, [5, 9])
    with ShardReader([*files[:1], *files[2:]]) as pieces:
        with pytest.raises(RunError, match=r"contains no exp_avg for element 5 of weight"):
            pieces.read_tensor(KIND, "weight")
        pieces.read_range(KIND, "weight", how, Axis(0, 2), 0, 5)  # the existing range is found
        with pytest.raises(RunError, match="contains no data for bias"):
            pieces.read_tensor(KIND, "bias")
        with pytest.raises(RunError, match="exp_avg_sq of weight cannot be read"):
            pieces.read_tensor("exp_avg_sq", "weight")


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    tensor_files.write_tensors(tmp_path / "plain", {"weight": torch.zeros(3)}, {})
    (tmp_path / "text").write_text("no")
    for name in ("plain", "text", "missing"):
        with (
            pytest.raises(RunError, match=f"{name}: not a file of parameter shards"),
            ShardReader([tmp_path / name]),
        ):
            pass


@given(size=some.integers(1, 50), ranks=some.integers(1, 9))
def test_shards_of_a_shared_parameter_recombine(size: int, ranks: int) -> None:
    held = fragment(nn.Parameter(torch.randn(size + 3)), 2, size + 2)
    shares = [held.split_over_axis(Axis(index, ranks)) for index in range(ranks)]
    assert torch.equal(torch.cat([each.master for each in shares]), held.master)
    assert torch.equal(torch.cat([each.moments[KIND] for each in shares]), held.master)
    stop = held.start
    for each in shares:
        assert each.start == stop
        stop = each.stop
    assert stop == held.stop
