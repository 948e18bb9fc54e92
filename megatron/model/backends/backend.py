"""The interface of an attention backend."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.shape import Span


@dataclass(frozen=True)
class Rows:
    """What attention is computed from. B batch, H heads, R query rows, C key columns, d head dimension."""

    q: Tensor
    """Rotated queries [B, H, R, d]."""
    k: Tensor
    """Rotated keys [B, H, C, d]."""
    v: Tensor
    """Values [B, H, C, d]."""
    query: Span
    key: Span
    encoding: Encoding
    processor: Processor | None
    key_mask: Tensor | None = None
    """Bool [B, C] or [B, R, C], False for padding and keys of another document."""
    dropout: float = 0.0


class Backend(Protocol):
    """A way to compute softmax(logits)·v, the logits being `megatron.position.scores.logits`."""

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        """Why this backend cannot do the combination, or None if it can."""

    def __call__(self, rows: Rows) -> Tensor:
        """Attention output [B, H, R, d]."""
