"""What a pipeline stage has of the model.

Layers are divided in order. Where they do not divide evenly, the first stages have one more: the last one also computes
the logits. Besides its layers a stage holds what it uses: the first the token embedding and what an encoding adds to
it, the last the final norm and the output matrix. A tied embedding is used by both, and an encoding that all layers
share by all stages: each holds it, in copies that stay the same because their gradients are summed.
"""

from typing import Any

from torch import Tensor, nn

from megatron.model.layer import Layer
from megatron.parallel.mesh import Axis


def layers_of(num_layers: int, stage: Axis) -> range:
    """The layers of a stage."""
    each, more = divmod(num_layers, stage.size)
    first = each * stage.index + min(stage.index, more)
    return range(first, first + each + (stage.index < more))


class Foreign(nn.Module):
    """A layer of another stage. It is built and dropped at once: the layers after it then draw the random numbers that
    they would draw in the whole model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        Layer(*args, **kwargs)

    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("this layer belongs to another stage")
