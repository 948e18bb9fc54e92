"""Sharding of parameters over tensor-parallel ranks, and their total size."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from models import build_model
from torch import nn

from megatron.distributed.mesh import Axis, Mesh, ParallelSizes
from megatron.distributed.sharding import (
    ShardSpec,
    count_all_elements,
    get_shard_spec,
    is_owned_by_rank,
    mark_replica,
    shard_tensor,
    unshard_tensors,
)
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions


def test_matrices_are_sharded_and_other_parameters_replicated() -> None:
    options = ModelOptions(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8)
    gpt = build_model(options, PositionOptions(pos_emb="kerple_log", score_processor="cdape"), 61, seed=1)
    held = {name for name, parameter in gpt.named_parameters() if get_shard_spec(parameter) is None}
    assert {name.split(".", 3)[-1] for name in held if name.startswith("decoder.layers.0.")} == {
        *("input_layernorm.weight", "input_layernorm.bias", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"),
        *("self_attention.linear_proj.bias", "mlp.linear_fc2.bias"),
        *(f"self_attention.core_attention.processor.{part}.{kind}" for part in ("hidden", "output")
          for kind in ("weight", "bias")),
    }  # fmt: skip
    assert {name for name in held if not name.startswith("decoder.layers.")} == {
        *("position.r1.value", "position.r2.value", "decoder.final_layernorm.weight", "decoder.final_layernorm.bias"),
    }


def test_elements_over_all_ranks() -> None:
    mesh = Mesh(1, ParallelSizes(tensor=4, data=2))
    part, copy = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))
    part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 1
    assert (count_all_elements(part, mesh), count_all_elements(copy, mesh)) == (24, 5)
    copy.ds_numel = 11  # ZeRO-3 stores only a shard
    assert count_all_elements(copy, mesh) == 11


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 1]))
def test_split_tensors_recombine(ranks: int, strips: int, size: int, dim: int) -> None:
    shape = [5, 5]
    shape[dim] = ranks * strips * size
    whole, how = torch.arange(float(shape[0] * shape[1])).reshape(shape), ShardSpec(dim, strips)
    parts = [shard_tensor(whole, how, Axis(rank, ranks)) for rank in range(ranks)]
    assert {part.shape[dim] for part in parts} == {strips * size}
    assert torch.equal(unshard_tensors(parts, how), whole)


def test_each_parameter_counts_once() -> None:
    part, norm, copy = (nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 1
    mark_replica(copy)
    meshes = [Mesh(rank, ParallelSizes(tensor=2)) for rank in range(2)]
    assert [is_owned_by_rank(part, mesh) for mesh in meshes] == [True, True]
    assert [is_owned_by_rank(norm, mesh) for mesh in meshes] == [True, False]
    assert [is_owned_by_rank(copy, mesh) for mesh in meshes] == [False, False]
