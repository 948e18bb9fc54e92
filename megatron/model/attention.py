"""The attention module that stands as `core_attention` in megatron-core's layer.

It asks the encoding's hooks and the processor, never their names.
T sequence, B batch, H heads, h heads of this rank, g of these that have keys and values of their own (h, unless queries
are grouped), d head dimension.
"""

from dataclasses import dataclass

from einops import rearrange
from torch import Tensor

from megatron.distributed.processes import Processes
from megatron.model.backends.backend import AttentionBackend
from megatron.model.cache import KVCache
from megatron.model.megatron_core import MegatronModule, TransformerConfig
from megatron.model.shared_attention import gather_heads, gather_sequence, tensor_parallel_heads
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import AttentionInputs
from megatron.position.shape import PositionRange
from megatron.position.stretches import Segment, attend_segments, build_segments, last_tokens, rotate_segments


@dataclass
class LayerPositionConfig:
    """The encoding, processor, window and backend of one layer."""

    encoding: Encoding
    shared: bool
    """The encoding belongs to the whole model, which registers its parameters once."""
    processor: Processor | None
    window: int | None
    backend: AttentionBackend


@dataclass(frozen=True)
class AttentionContext:
    """What a forward pass reads: which places of their sequences its tokens stand at, and what came before them.

    It travels through megatron-core's layers in the place of their attention mask.
    """

    segments: tuple[Segment, ...]
    cache: KVCache | None = None
    num_logits: int | None = None
    """The top layer gives its output for the last n tokens only; like the others it reads all of them."""


class PositionedAttention(MegatronModule):
    """softmax(processor(weight·q·k/√d + contextual, bias))·v over causal keys.

    Args:
        config: megatron-core's.
        position: of this layer.
        layer_index: its number, from 0.
        groups: those that share it.
    """

    def __init__(
        self, config: TransformerConfig, position: LayerPositionConfig, layer_index: int, groups: Processes
    ) -> None:
        super().__init__(config=config)
        # In a tuple the shared encoding is no submodule here: its parameters are registered by the model, once.
        self._shared: tuple[Encoding, ...] = (position.encoding,) if position.shared else ()
        self._own = None if position.shared else position.encoding
        self.processor = position.processor
        self.window = position.window
        self.backend = position.backend
        self.layer_index = layer_index
        self.groups = groups
        self.heads = tensor_parallel_heads(groups.mesh.tensor, config.num_attention_heads)
        assert config.num_query_groups is not None  # megatron-core fills it in
        self.queries_per_key = config.num_attention_heads // config.num_query_groups

    @property
    def encoding(self) -> Encoding:
        """This layer's position encoding."""
        return self._shared[0] if self._own is None else self._own

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: AttentionContext | None = None, **_: object
    ) -> Tensor:
        """megatron-core's call: query [T, B, h, d], key and value [T, B, g, d] → [T or reading.last, B, h·d].

        megatron-core passes more (mask type, bias, packing) that its GPT layers leave at the causal default.
        """
        context = attention_mask if attention_mask is not None else AttentionContext(build_segments(query.shape[0]))
        q, k, v = (rearrange(x, "t b h d -> b h t d") for x in (query, key, value))
        q, k = (rotate_segments(x, self.encoding, context.segments) for x in (q, k))
        if context.cache is not None:
            k, v = context.cache.extend(self.layer_index, k, v)
        segments = context.segments
        if context.num_logits is not None:
            q, segments = q[:, :, -context.num_logits :], last_tokens(segments, q.shape[2], context.num_logits)
        if self.processor is not None:
            q, k = (gather_heads(x, self.groups) for x in (q, k))
        k, v = (gather_sequence(x, self.groups) for x in (k, v))
        # Only now: the cache holds, and ranks exchange, the heads that there are.
        k, v = (x.repeat_interleave(self.queries_per_key, 1) if self.queries_per_key > 1 else x for x in (k, v))
        return rearrange(attend_segments(q, k, v, segments, self._attend), "b h t d -> t b (h d)")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Tensor:
        query = segment.positions
        return self.backend(
            AttentionInputs(
                q=q,
                k=k,
                v=v,
                query=query,
                key=PositionRange(0, query.stop, query.sampled),
                encoding=self.encoding,
                processor=self.processor,
                key_mask=segment.key_mask,
                window=self.window,
                heads=self.heads,
                dropout=self.config.attention_dropout if self.training else 0.0,
            )
        )
