"""The interface of an attention backend."""

from typing import Protocol

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import AttentionInputs


class AttentionBackend(Protocol):
    """A way to compute softmax(logits)·v, the logits being `megatron.position.scores.logits`."""

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        """Why this backend cannot do the combination, or None if it can."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Attention output [B, h, R, d]."""
