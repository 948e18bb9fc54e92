"""Which layers each pipeline stage holds, without any process.

Layers are divided in order. Where they do not divide evenly, the first stages have one more: the last one also computes
the logits.
"""

from megatron.distributed.mesh import Axis


def layers_of(num_layers: int, stage: Axis) -> range:
    """The layers of a stage."""
    each, more = divmod(num_layers, stage.size)
    first = each * stage.index + min(stage.index, more)
    return range(first, first + each + (stage.index < more))
