"""float32 master weights of a single-process engine."""

from typing import Any

from torch import Tensor

from megatron.checkpoint.engine_state import list_optimizer_shards


def masters(engine: Any) -> dict[str, Tensor]:
    """Return copies of all master weights of DeepSpeed's `engine`, by name."""
    found = {}
    for each in list_optimizer_shards(engine):
        shape = getattr(each.parameter, "ds_shape", each.parameter.shape)
        found[each.name] = each.master.clone().view(shape)
    return found
