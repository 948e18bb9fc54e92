"""The float32 masters of an engine of one process."""

from typing import Any

from torch import Tensor

from megatron.checkpoint.engine_state import list_optimizer_shards


def masters(engine: Any) -> dict[str, Tensor]:
    """Copies of all of them, by name. engine: DeepSpeed's."""
    found = {}
    for each in list_optimizer_shards(engine):
        shape = getattr(each.parameter, "ds_shape", each.parameter.shape)
        found[each.name] = each.master.clone().view(shape)
    return found
