"""What a pipeline stage has of the model.

Besides its layers (`distributed/layers.py`) a stage holds what it uses: the first the token embedding and what an
encoding adds to it, the last the final norm and the output matrix. A tied embedding is used by both, and an encoding
that all layers share by all stages: each holds it, in copies that stay the same because their gradients are summed.
"""

from typing import Any

from torch import Tensor, nn

from megatron.model.layer import GPTLayer


class OffStageLayer(nn.Module):
    """A layer of another stage. It is built and dropped at once: the layers after it then draw the random numbers that
    they would draw in the whole model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        GPTLayer(*args, **kwargs)

    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("this layer belongs to another stage")
