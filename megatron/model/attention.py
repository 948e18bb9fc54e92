"""The attention module that stands as `core_attention` in megatron-core's layer.

It asks the encoding's hooks and the processor, never their names. T sequence, B batch, H heads, d head dimension.
"""

from dataclasses import dataclass

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.model.backends.backend import Backend, Rows
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.shape import Span


@dataclass
class LayerPosition:
    """The encoding, processor and backend of one layer."""

    encoding: Encoding
    shared: bool
    """The encoding belongs to the whole model, which registers its parameters once."""
    processor: Processor | None
    backend: Backend


class PositionedAttention(MegatronModule):
    """softmax(processor(weight·q·k/√d + contextual, bias))·v over causal keys."""

    def __init__(self, config: TransformerConfig, position: LayerPosition) -> None:
        super().__init__(config=config)
        # In a tuple the shared encoding is no submodule here: its parameters are registered by the model, once.
        self._shared = (position.encoding,) if position.shared else ()
        self._own = None if position.shared else position.encoding
        self.processor = position.processor
        self.backend = position.backend

    @property
    def encoding(self) -> Encoding:
        """This layer's position encoding."""
        return self._shared[0] if self._own is None else self._own

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: object):
        """megatron-core's call: query, key, value [T, B, H, d] → [T, B, H·d].

        `attention_mask` is bool [B, T], True where a key may be seen; None when all may. megatron-core passes more
        (mask type, bias, packing) that its GPT layers leave at the causal default.
        """
        length, batch, heads, dim = query.shape
        span = Span(0, length)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = self.backend(
            Rows(
                q=self.encoding.rotate(q, span),
                k=self.encoding.rotate(k, span),
                v=v,
                query=span,
                key=span,
                encoding=self.encoding,
                processor=self.processor,
                key_mask=attention_mask,
                dropout=self.config.attention_dropout if self.training else 0.0,
            )
        )
        return output.permute(2, 0, 1, 3).reshape(length, batch, heads * dim)
