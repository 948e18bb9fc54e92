"""Attention module used as `core_attention` in megatron-core's layer.

It calls the hooks of the encoding and of the processor, and never checks their names. Ranks that share a layer or a
sequence exchange the tensors that attention needs from other ranks.

Tensor parallelism: megatron-core splits the linear layers, so each rank computes a contiguous range of heads. For our
modules this means:

* Every rank holds all parameters of encodings and processors and uses those of its heads. Its gradients are partial, so
  gradients are summed over ranks. Otherwise the copies would diverge.
* A processor mixes the scores of all heads. So ranks exchange heads for rows: each computes all heads for a share of
  the query rows, and the output is exchanged back. Keys and values of all heads are gathered; queries are
  gathered only if the processor reads rows above those of the rank.
  Communication is linear in T; score matrices are never exchanged. If the rows are not divisible, are few (decoding),
  or some sequences are padded, each rank keeps its heads, gathers the queries of all heads and computes all scores.

Context parallelism: a rank holds a part of the tokens (`distributed/mesh.py`) and computes their rows. It needs the
keys and values of all tokens, and all queries if the processor reads rows above. Its gradients for the keys and queries
of other ranks are reduced to those ranks.

Shapes: T sequence length, t tokens of a rank, B batch, H heads, h heads of this rank, g key-value heads of this rank (h
unless queries are grouped), d head dimension. Rotated queries and keys may be longer (`Encoding.qk_head_dim`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.attention.backends.backend import (
    AttentionBackend,
    AttentionFormula,
    get_gate_sum_function,
    reads_whole_table,
)
from megatron.attention.inputs import AttentionInputs
from megatron.attention.query_rows import PrecedingRows, QueryRows, describe_query_rows, scale_queries
from megatron.attention.reference import compute_table_of_ranges, sum_gates
from megatron.attention.segments import (
    Segment,
    attend_segments,
    build_segments,
    drop_keys,
    has_no_hidden_keys,
    rotate_segments,
    select_chunks,
    select_last_tokens,
)
from megatron.attention.softmax import SoftmaxSink
from megatron.distributed.mesh import Axis, list_context_chunks
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import (
    all_gather,
    exchange_heads_for_rows,
    exchange_rows_for_heads,
    gather_heads,
    gather_sequence,
    sum_grad,
)
from megatron.model.core_modules import MegatronModule, TransformerConfig
from megatron.model.kv_cache import KVCache
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import OptionError
from megatron.position.numerics import has_parameters_sharded_by_zero3
from megatron.position.temperature import Temperature
from megatron.position.token_range import ALL_HEADS, TokenRange
from megatron.utils.errors import UserError


def get_tensor_parallel_heads(tensor: Axis, num_heads: int) -> slice:
    """Return the heads that a tensor-parallel rank computes; the number of ranks must divide num_heads."""
    if tensor.size == 1:
        return ALL_HEADS
    count = num_heads // tensor.size
    first = count * tensor.index
    return slice(first, first + count)


@dataclass
class LayerAttention:
    """Modules and settings of one layer's attention: its position method, window and backend."""

    formula: AttentionFormula
    shared: bool
    """True if the encoding belongs to the whole model, which registers its parameters once."""
    window: int | None
    backend: AttentionBackend
    query_multiplier: float = 1.0
    """Multiplier of the queries; the backend divides their products with keys by √d (`megatron/model/mup.py`)."""
    temperature: Temperature | None = None
    sink: SoftmaxSink | None = None


ROTATION = ("rotate", "rotate_keys", "get_cos_sin")
"""Functions of an encoding that define its rotation. A subclass that overrides one must override all."""


@dataclass(frozen=True)
class AttentionContext:
    """Inputs of a forward pass: positions of its tokens, cache of earlier tokens, and precomputed terms.

    megatron-core's layers pass it on as their attention mask.
    """

    segments: tuple[Segment, ...]
    kv_cache: KVCache | None = None
    num_logits: int | None = None
    """Number of last tokens for which the top layer computes its output, or None for all. Every layer reads all tokens.
    """
    tables: Mapping[int, ScoreTerms] = field(default_factory=dict)
    """Score tables of encodings by layer index, if computed before the layers (`LayerGroups.build_context`)."""
    processor_terms: Mapping[int, Any] = field(default_factory=dict)
    """Terms that the backend computed from processors and tables before the layers
    (`TritonBackend.compute_processor_terms`).
    """
    masked_segments: Mapping[int, tuple[Segment, ...]] = field(default_factory=dict)
    """Segments by layer index, with the document masks that the backend computed before the layers
    (`backend.compute_document_masks`).
    """
    restarted: TokenRange | None = None
    """Positions of all tokens when documents are masked (`documents.restart_positions`), or None."""
    query_rows: Mapping[int | None, QueryRows] = field(default_factory=dict)
    """Query rows for the temperature, by window of the layers that have one (`build_query_rows`)."""


class PositionedAttention(MegatronModule):
    """Attention softmax(processor(weight·q·k/√d + contextual, bias))·v over causal keys; q·k/√d may be soft-capped.

    Args:
        config: configuration of megatron-core.
        layer_attention: modules and settings of this layer's attention.
        layer_index: index of the layer, from 0.
        groups: process groups that share the layer.
    """

    def __init__(
        self, config: TransformerConfig, layer_attention: LayerAttention, layer_index: int, groups: ProcessGroups
    ) -> None:
        super().__init__(config=config)
        self.formula = layer_attention.formula  # hides the modules from nn.Module
        # A shared encoding's parameters are registered once, by the model. The attribute names are those of weights in
        # checkpoints: see `manifest.WEIGHT_RENAMES`.
        self.position = None if layer_attention.shared else self.formula.encoding
        self.processor = self.formula.processor
        self.temperature, self.sink = layer_attention.temperature, layer_attention.sink
        self.window = layer_attention.window
        self.backend = layer_attention.backend
        self.query_multiplier = layer_attention.query_multiplier
        self.layer_index = layer_index
        self.groups = groups
        self.heads = get_tensor_parallel_heads(groups.mesh.tensor, config.num_attention_heads)
        assert config.num_query_groups is not None  # set by megatron-core
        self.queries_per_key = config.num_attention_heads // config.num_query_groups

    @property
    def encoding(self) -> Encoding:
        return self.formula.encoding

    @property
    def is_encoding_shared(self) -> bool:
        """True if the encoding belongs to the whole model."""
        return self.position is None

    @property
    def num_cached_keys(self) -> int | None:
        """Number of preceding keys on which a row may depend, or None for all."""
        beyond = 0 if self.processor is None else self.processor.left_context + self.processor.preceding_rows
        return None if self.window is None else self.window - 1 + beyond

    def compute_table(self, segments: Sequence[Segment], device: torch.device) -> ScoreTerms | None:
        """Compute the encoding's table over all distances of a forward pass.

        Return None if the backend reads no whole table.
        """
        if not reads_whole_table(self.backend):
            return None
        ranges = [(segment.tokens, segment.context) for segment in segments]
        return compute_table_of_ranges(self.encoding, ranges, device)

    @property
    def has_gates(self) -> bool:
        """True if the encoding computes gates from the layer's input."""
        return type(self.encoding).overrides_hook("gate")

    def compute_gates(self, hidden: Tensor) -> Tensor | None:
        """Compute the encoding's gates from the layer's input [T, B, D]: float32 [B, h, T], or None if it has none."""
        if not self.has_gates:
            return None
        return self.encoding.gate(sum_grad(hidden, self.groups).transpose(0, 1), self.heads)

    def get_rotation(self, like: Tensor, context: AttentionContext | None) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin, float32 [T, r], with which a region rotates queries and keys.

        Return None if the encoding rotates them itself or not at all. `like` has the shape [T, B, …] of the pass.
        """
        segments = build_segments(like.shape[0]) if context is None else context.segments
        if (
            len(segments) > 1
            or not has_no_hidden_keys(segments)
            or (context is not None and context.restarted is not None)
        ):
            return None
        owners = {next(kind for kind in type(self.encoding).__mro__ if name in vars(kind)) for name in ROTATION}
        if len(owners) > 1:
            return None  # a subclass overrides only some of the functions, so they may disagree
        return self.encoding.get_cos_sin(like, segments[0].tokens)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionContext | None = None,
        *,
        gates: Tensor | None = None,
        is_rotated: bool = False,
        **_: object,
    ) -> Tensor:
        """Compute attention: query [T, B, h, d], key and value [T, B, g, d] → [T or num_logits, B, h·d].

        megatron-core passes only a mask through its layers, so `attention_mask` is the `AttentionContext`, which holds
        the masks of its segments. Other arguments of megatron-core (mask type, bias, packing) keep their causal
        defaults. `gates` [B, h, T] is from `compute_gates`; `is_rotated` is True if queries and keys are already
        rotated (`get_rotation`).
        """
        context = attention_mask if attention_mask is not None else AttentionContext(build_segments(query.shape[0]))
        turns_multiples = self.encoding.rotates_linearly and not is_rotated
        if self.query_multiplier != 1.0 and turns_multiples:
            query = query * self.query_multiplier
        # einops would take longer than the operation it calls, and the host issues this for every layer of a step.
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        try:
            if not is_rotated:
                q, k = rotate_segments(q, k, self.encoding, context.segments, context.restarted, self.heads)
        except OptionError as error:
            raise UserError(str(error)) from error
        if self.query_multiplier != 1.0 and not turns_multiples:
            q = q * self.query_multiplier
        if self.temperature is not None:
            rows = context.query_rows or build_query_rows(
                [self], context.segments, q.shape[0], q.shape[2], q.device, context.restarted
            )
            q = scale_queries(q, self.temperature, rows[self.window], self.heads)
        segments = context.masked_segments.get(self.layer_index, context.segments)
        # Queries of all rows available here, for a processor that reads rows above.
        queries, row_sums = q if self.reads_preceding_rows else None, None
        if context.kv_cache is not None:
            (k, v, gates), num_dropped = context.kv_cache.extend(self.layer_index, k, v, gates)
            if num_dropped:
                segments = drop_keys(segments, num_dropped)
            if queries is not None:
                queries, row_sums = self._extend_rows(context.kv_cache, queries, k.shape[2])
        if context.num_logits is not None:
            q, segments = q[:, :, -context.num_logits :], select_last_tokens(segments, q.shape[2], context.num_logits)
        shares_rows, heads = self._shares_rows(context, q.shape[2]), self.heads
        if shares_rows:
            chunks = list_context_chunks(q.shape[2], self.groups.mesh.tensor)
            # Rank 0's chunks are apart; those of the last rank are adjacent.
            segments = select_chunks(segments, chunks, join_adjacent=not self._is_sharded_by_zero3)
            heads = ALL_HEADS
            if queries is None:
                q = exchange_heads_for_rows(q, self.groups)
            else:
                queries = gather_heads(queries, self.groups)
                q = torch.cat([queries[:, :, first : first + size] for first, size in chunks], dim=2)
            k, v = (gather_heads(x, self.groups) for x in (k, v))
            gates = None if gates is None else gather_heads(gates, self.groups)
        elif self.processor is not None:
            if queries is None:
                q, k = (gather_heads(x, self.groups) for x in (q, k))
            else:
                queries, k = (gather_heads(x, self.groups) for x in (queries, k))
                q = queries[:, :, queries.shape[2] - q.shape[2] :]
            gates = None if gates is None else gather_heads(gates, self.groups)
        k, v = gather_sequence(k, v, self.groups)
        if gates is not None:  # too small to be exchanged separately, unlike keys and values
            gates = all_gather(gates, 2, self.groups, "context", reduce_grad=True)
        above = None
        if queries is not None:
            above = PrecedingRows(
                all_gather(queries, 2, self.groups, "context", reduce_grad=True), k.shape[2], row_sums
            )
        if len(segments) > 1:
            q = q.contiguous()  # a view would keep the adjacent keys and values alive
        # Repeated only here, so that the cache stores and ranks exchange each key-value head once.
        k, v = (x.repeat_interleave(self.queries_per_key, 1) if self.queries_per_key > 1 else x for x in (k, v))
        table = context.tables.get(self.layer_index) or self.compute_table(segments, q.device)
        terms = context.processor_terms.get(self.layer_index)
        sinks = None if self.sink is None else self.sink(q)
        attend = partial(self._attend, heads=heads, sinks=sinks, table=table, processor_terms=terms, above=above)
        output = attend_segments(q, k, v, segments, attend, gates)
        if shares_rows:
            output = exchange_rows_for_heads(output, self.groups)
        return output.permute(2, 0, 1, 3).flatten(2)

    @property
    def reads_preceding_rows(self) -> bool:
        """True if the processor makes a row depend on rows above it."""
        return self.processor is not None and self.processor.reads_preceding_rows

    def _extend_rows(self, cache: KVCache, q: Tensor, num_keys: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows that a processor reads, or None if it reads no earlier rows.

        These are the queries of these rows preceded by earlier ones, and the sums over all rows before them.
        """
        assert self.processor is not None
        if self.processor.overrides("row_terms"):
            return q, cache.extend_row_sums(self.layer_index, q, num_keys)
        return cache.extend_queries(self.layer_index, q, self.processor.preceding_rows), None

    @property
    def _is_sharded_by_zero3(self) -> bool:
        """True if ZeRO 3 shards the processor's parameters; all ranks must then call it equally often."""
        return self.processor is not None and has_parameters_sharded_by_zero3(self.processor)

    def _shares_rows(self, context: AttentionContext, length: int) -> bool:
        """Return True if tensor-parallel ranks exchange heads for rows."""
        size = self.groups.mesh.tensor.size
        is_whole = context.kv_cache is None and context.num_logits is None and has_no_hidden_keys(context.segments)
        return self.processor is not None and size > 1 and is_whole and length % (2 * size) == 0

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        segment: Segment,
        *,
        heads: slice,
        sinks: Tensor | None,
        table: ScoreTerms | None,
        processor_terms: Any,
        above: PrecedingRows | None,
    ) -> Tensor:
        row_bias, key_bias = get_gate_sum_function(self.backend, sum_gates)(gates, segment.tokens.length)
        inputs = AttentionInputs(
            q=q,
            k=k,
            v=v,
            query=segment.tokens,
            key=segment.context,
            encoding=self.encoding,
            processor=self.processor,
            key_mask=segment.key_mask,
            document_starts=segment.document_starts,
            document_mask=segment.document_mask,
            window=self.window,
            softcap=self.formula.softcap,
            sinks=sinks,
            uses_stick_breaking=self.formula.uses_stick_breaking,
            adds_remainder=self.formula.adds_remainder,
            heads=heads,
            dropout=self.config.attention_dropout if self.training else 0.0,
            table=table,
            processor_terms=processor_terms,
            row_bias=row_bias,
            key_bias=key_bias,
        )
        if above is None or self.processor is None:
            return self.backend(inputs)
        inputs = above.add_to(inputs, segment)
        output = self.backend(inputs)
        if above.sums is not None:
            above.add_rows(inputs, segment)
        return output


def build_query_rows(
    attentions: Sequence[PositionedAttention],
    segments: Sequence[Segment],
    batch: int,
    length: int,
    device: torch.device,
    restarted: TokenRange | None = None,
) -> dict[int | None, QueryRows]:
    """Compute the inputs of the layers' temperatures for a forward pass, by window.

    Args:
        attentions: attention modules of the layers.
        segments, batch, length, device: as for `describe_query_rows`.
        restarted: positions of all tokens, T · B, if they do not follow the segments.
    """
    windows = {attention.window for attention in attentions if attention.temperature is not None}
    rows = {window: describe_query_rows(segments, window, batch, length, device) for window in windows}
    if restarted is None or not rows:
        return rows
    positions = restarted.positions(device).float().unflatten(0, (length, batch)).t()
    return {window: own._replace(positions=positions) for window, own in rows.items()}
