"""The attention module that stands as `core_attention` in megatron-core's layer.

It asks the encoding's hooks and the processor, never their names.
T sequence, B batch, H heads, h heads of this rank, g of these that have keys and values of their own (h, unless queries
are grouped), d head dimension.
"""

from dataclasses import dataclass

from einops import rearrange
from torch import Tensor

from megatron.distributed.processes import Processes
from megatron.model.backends.backend import Backend
from megatron.model.cache import Cache
from megatron.model.megatron_core import MegatronModule, TransformerConfig
from megatron.model.shared_attention import gather_heads, gather_places, heads_of
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import Rows
from megatron.position.shape import Span
from megatron.position.stretches import Stretch, attended, ending, rotated, stretches


@dataclass
class LayerPosition:
    """The encoding, processor, window and backend of one layer."""

    encoding: Encoding
    shared: bool
    """The encoding belongs to the whole model, which registers its parameters once."""
    processor: Processor | None
    window: int | None
    backend: Backend


@dataclass(frozen=True)
class Reading:
    """What a forward pass reads: which places of their sequences its tokens stand at, and what came before them.

    It travels through megatron-core's layers in the place of their attention mask.
    """

    stretches: tuple[Stretch, ...]
    cache: Cache | None = None
    last: int | None = None
    """The top layer gives its output for the last n tokens only; like the others it reads all of them."""


class PositionedAttention(MegatronModule):
    """softmax(processor(weight·q·k/√d + contextual, bias))·v over causal keys.

    Args:
        config: megatron-core's.
        position: of this layer.
        layer: its number, from 0.
        processes: those that share it.
    """

    def __init__(self, config: TransformerConfig, position: LayerPosition, layer: int, processes: Processes) -> None:
        super().__init__(config=config)
        # In a tuple the shared encoding is no submodule here: its parameters are registered by the model, once.
        self._shared: tuple[Encoding, ...] = (position.encoding,) if position.shared else ()
        self._own = None if position.shared else position.encoding
        self.processor = position.processor
        self.window = position.window
        self.backend = position.backend
        self.layer = layer
        self.processes = processes
        self.heads = heads_of(processes.mesh.tensor, config.num_attention_heads)
        assert config.num_query_groups is not None  # megatron-core fills it in
        self.queries_per_key = config.num_attention_heads // config.num_query_groups

    @property
    def encoding(self) -> Encoding:
        """This layer's position encoding."""
        return self._shared[0] if self._own is None else self._own

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Reading | None = None, **_: object
    ) -> Tensor:
        """megatron-core's call: query [T, B, h, d], key and value [T, B, g, d] → [T or reading.last, B, h·d].

        megatron-core passes more (mask type, bias, packing) that its GPT layers leave at the causal default.
        """
        reading = attention_mask if attention_mask is not None else Reading(stretches(query.shape[0]))
        q, k, v = (rearrange(x, "t b h d -> b h t d") for x in (query, key, value))
        q, k = (rotated(x, self.encoding, reading.stretches) for x in (q, k))
        if reading.cache is not None:
            k, v = reading.cache.extend(self.layer, k, v)
        parts = reading.stretches
        if reading.last is not None:
            q, parts = q[:, :, -reading.last :], ending(parts, q.shape[2], reading.last)
        if self.processor is not None:
            q, k = (gather_heads(x, self.processes) for x in (q, k))
        k, v = (gather_places(x, self.processes) for x in (k, v))
        # Only now: the cache holds, and ranks exchange, the heads that there are.
        k, v = (x.repeat_interleave(self.queries_per_key, 1) if self.queries_per_key > 1 else x for x in (k, v))
        return rearrange(attended(q, k, v, parts, self._attend), "b h t d -> t b (h d)")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, stretch: Stretch) -> Tensor:
        query = stretch.span
        return self.backend(
            Rows(
                q=q,
                k=k,
                v=v,
                query=query,
                key=Span(0, query.stop, query.drawn),
                encoding=self.encoding,
                processor=self.processor,
                key_mask=stretch.key_mask,
                window=self.window,
                heads=self.heads,
                dropout=self.config.attention_dropout if self.training else 0.0,
            )
        )
