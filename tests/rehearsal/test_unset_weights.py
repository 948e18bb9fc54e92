"""Models without values have the same shapes, types and attributes as others."""

import torch
from models import build_model

from megatron.distributed.sharding import get_shard_spec
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.rehearsal.missing_ranks import MIN_ELEMENTS, ZeroStagingBuffers, skip_weight_initialization

OPTIONS = ModelOptions(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, activation="swiglu")


def describe(model):
    return {name: (p.shape, p.dtype, get_shard_spec(p), p.requires_grad) for name, p in model.named_parameters()}


def test_models_without_values_are_sharded_like_others():
    drawn = build_model(OPTIONS, PositionOptions(pos_emb="kerple_log"), 5000)
    with skip_weight_initialization():
        unset = build_model(OPTIONS, PositionOptions(pos_emb="kerple_log"), 5000)
    assert describe(unset) == describe(drawn)
    assert sum(get_shard_spec(p) is not None for p in unset.parameters()) >= 10
    for name, value in unset.named_parameters():
        if "norm" in name:
            assert torch.equal(value, drawn.get_parameter(name)), name


def test_large_weights_change_their_type_without_contents():
    large, small = torch.ones(MIN_ELEMENTS), torch.ones(8)
    with skip_weight_initialization():
        assert (large.bfloat16().dtype, large.bfloat16().shape) == (torch.bfloat16, large.shape)
        assert torch.equal(small.bfloat16(), torch.ones(8, dtype=torch.bfloat16))
        assert large.to("cpu") is large
        copies = ZeroStagingBuffers().copy_to_host({"a": large, "b": small, "none": torch.empty(0)})
    assert {name: copy.shape for name, copy in copies.items()} == {"a": large.shape, "b": small.shape, "none": (0,)}
    assert not copies["a"].any()
    assert torch.equal(large.half(), torch.ones(MIN_ELEMENTS, dtype=torch.half)), "outside it nothing is changed"
