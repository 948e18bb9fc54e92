"""The interface of an attention backend."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.scores import Dense
from megatron.position.shape import ALL_HEADS, Span


@dataclass(frozen=True)
class Rows:
    """What attention is computed from. B batch, H heads, h heads wanted, R query rows, C key columns, d head dim."""

    q: Tensor
    """Rotated queries [B, H, R, d]; without a processor [B, h, R, d]."""
    k: Tensor
    """Rotated keys [B, H or h, C, d]."""
    v: Tensor
    """Values [B, h, C, d]."""
    query: Span
    key: Span
    encoding: Encoding
    processor: Processor | None
    key_mask: Tensor | None = None
    """Bool [B, C] or [B, R, C], False for padding and keys of another document."""
    window: int | None = None
    """A row sees the last `window` keys only, its own included."""
    heads: slice = field(default_factory=lambda: ALL_HEADS)  # slices are not hashable before Python 3.12
    """The wanted heads: a tensor-parallel rank's own."""
    dropout: float = 0.0
    dense: Dense | None = None
    """Computes the encoding's matrices in its stead, where a backend knows a faster way."""


class Backend(Protocol):
    """A way to compute softmax(logits)·v, the logits being `megatron.position.scores.logits`."""

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        """Why this backend cannot do the combination, or None if it can."""

    def __call__(self, rows: Rows) -> Tensor:
        """Attention output [B, h, R, d]."""
