"""Inputs of a forward pass that are prepared before the layers: segments of its tokens, and terms that layers share.

Segments describe the positions of the tokens and the keys that each may see. They depend on the cache of earlier
tokens, padding, documents, randomized positions, and on the tokens that a rank of context parallelism holds.

Score tables, processor terms and document masks are computed once before the layers, so that activation recomputation
does not repeat them. Layers belong together if the same call serves them, or if one call computes the terms of several
at once. Shapes: B batch, T sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.attention.backends.backend import compute_document_masks, reads_whole_table
from megatron.attention.documents import (
    check_document_starts,
    find_document_starts,
    mask_documents,
    restart_positions,
    split_documents,
)
from megatron.attention.reference import compute_tables_of_layers
from megatron.attention.segments import (
    SampleFunction,
    Segment,
    build_segments,
    concatenate_ranges,
    has_no_hidden_keys,
    select_chunks,
    skip_sampling,
)
from megatron.distributed.mesh import list_context_chunks
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.attention import AttentionContext, PositionedAttention, build_query_rows
from megatron.model.kv_cache import KVCache
from megatron.position import token_range
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.numerics import has_parameters_sharded_by_zero3
from megatron.position.token_range import SampledPositions, TokenRange
from megatron.utils.errors import UserError


def find_documents(
    tokens: Tensor, end_of_document: int, mask: Tensor | None, kv_cache: KVCache | None
) -> tuple[Tensor | None, Tensor | None]:
    """Find `document_starts` from end-of-document tokens.

    Returns:
        The document starts and no mask, or None and the given mask if every row is one document after its padding.
    """
    read = tokens.cpu()
    if kv_cache is not None:
        kv_cache.tokens = read = read if kv_cache.tokens is None else torch.cat([kv_cache.tokens, read], dim=1)
    is_read = torch.ones_like(read, dtype=torch.bool) if mask is None else mask.cpu()
    if not bool((is_read & (read == end_of_document))[:, :-1].any()):
        return None, mask
    if bool((is_read[:, :-1] & ~is_read[:, 1:]).any()):
        raise RuntimeError("with document masking, rows can be padded on the left only")
    return find_document_starts(read, end_of_document, is_read), None


@dataclass(frozen=True)
class SegmentBuilder:
    """Builder of the segments of a model's forward passes."""

    groups: ProcessGroups
    layers: Sequence[Any]
    """Layers of this pipeline stage."""
    randomized: int | None
    """Number of positions from which a sequence's positions are sampled, or None."""
    continuous: bool
    """True if sampled positions are real numbers."""
    masks_documents: bool
    """True if attention covers all documents of a row at once."""
    max_length: int | None
    """Length of the longest sequence that the model has positions for, or None for any length."""

    @property
    def encodings(self) -> list[Encoding]:
        """Encodings of the layers, in order."""
        return [layer.self_attention.core_attention.encoding for layer in self.layers]

    def build_segments(
        self,
        batch: int,
        length: int,
        device: torch.device,
        *,
        mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        seed: int | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[tuple[Segment, ...], TokenRange | None]:
        """Build the segments of a forward pass, and the positions of its tokens if they do not follow the segments.

        Args:
            batch, length: B and T.
            device: device of the tokens.
            mask, kv_cache, seed, document_starts, position_ids: arguments of `GPT.forward`.

        Raises:
            UserError: if the model has no such positions.
        """
        restarted = None
        if position_ids is not None:
            if kv_cache is not None or document_starts is not None or self.randomized is not None:
                raise RuntimeError("position ids need whole rows with one document each, and no randomized positions")
            if any(encoding.far_distance for encoding in self.encodings):
                raise UserError(
                    "the task sets position ids, which rotary scaling selfextend and rerope do not support: they "
                    "need distances in tokens"
                )
            restarted = self._build_position_segments(position_ids, device)
        # Rows with one document need none of this, but under ZeRO 3 all ranks must call the same modules.
        separates = document_starts is not None and (
            bool(document_starts.any()) or has_parameters_sharded_by_zero3(self.layers[0])
        )
        is_sampled_once = kv_cache is not None and self.randomized is not None
        if is_sampled_once and (separates or (mask is not None and not bool(mask[:, 0].all()))):
            raise UserError(
                "randomized_positions: a cache cannot decode several documents in a row, or rows padded on the left, "
                "because positions depend on the final length of each; use rows of equal length without "
                "end-of-document tokens"
            )
        if document_starts is not None and separates:
            if mask is not None:
                raise RuntimeError("document_starts cannot be combined with padding")
            return self._build_document_segments(document_starts, batch, length, kv_cache, seed, device)
        return self._build_row_segments(length, mask, kv_cache, seed), restarted

    def sample_positions(self, length: int, seed: int | None) -> SampledPositions | None:
        if self.randomized is None:
            return None
        try:
            seed = length if seed is None else seed
            return token_range.sample_positions(length, self.randomized, seed, continuous=self.continuous)
        except ValueError as error:
            raise UserError(str(error)) from error

    def _build_row_segments(
        self, length: int, mask: Tensor | None, kv_cache: KVCache | None, seed: int | None
    ) -> tuple[Segment, ...]:
        """Build the segments that describe the positions of this rank's `length` tokens."""
        if kv_cache is not None:
            kv_cache.check_capacity(length)
            sample_cached = skip_sampling if kv_cache.sampled is None else lambda _: kv_cache.sampled
            return build_segments(length, mask, kv_cache.length, sample_cached, kv_cache.capacity)
        context = self.groups.mesh.context
        if context.size == 1:
            sample: SampleFunction = (
                skip_sampling if self.randomized is None else lambda tokens: self.sample_positions(tokens, seed)
            )
            return build_segments(length, mask, sample=sample)
        total = length * context.size
        sampled = self.sample_positions(total, seed)
        return concatenate_ranges(
            [TokenRange(start, size, sampled, total) for start, size in list_context_chunks(total, context)]
        )

    def _build_document_segments(
        self, starts: Tensor, batch: int, length: int, kv_cache: KVCache | None, seed: int | None, device: torch.device
    ) -> tuple[tuple[Segment, ...], TokenRange]:
        """Build the segments of rows with masked documents, and their positions, which restart at each document."""
        if any(encoding.depends_on_length for encoding in self.encodings):
            raise UserError(
                "documents cannot be masked: an encoding of the model depends on the length of the whole row "
                "(rotary with scaling dynamic or longrope); give each document its own row"
            )
        context, past = self.groups.mesh.context, 0 if kv_cache is None else kv_cache.length
        check_document_starts(starts, batch, past + length * context.size)
        if kv_cache is not None:
            kv_cache.check_capacity(length)
        if self.masks_documents:
            segments = mask_documents(starts, past, device)
        else:
            segments = split_documents(starts, past, lambda tokens: self.sample_positions(tokens, seed))
        chunks = list_context_chunks(length * context.size, context)
        columns = torch.cat([torch.arange(past + first, past + first + size) for first, size in chunks])
        capacity = None if kv_cache is None else kv_cache.capacity
        restarted = restart_positions(starts, columns, device, segments, capacity)
        if context.size > 1:
            segments = select_chunks(segments, chunks, join_adjacent=False)
        if self.max_length is not None and restarted.position_limit > self.max_length:
            raise UserError(
                f"the model has {self.max_length} positions, but a document has {restarted.position_limit} tokens"
            )
        return segments, restarted

    def _build_position_segments(self, position_ids: Tensor, device: torch.device) -> TokenRange:
        """Build the range of T·B tokens with position ids [B, T] on the CPU.

        The layout is that of `documents.restart_positions`.
        """
        for encoding in self.encodings:
            if not encoding.takes_any_positions() or encoding.depends_on_length:
                raise UserError(f"position ids: {type(encoding).__name__} supports only consecutive positions")
        values = position_ids.t().flatten().to(device, non_blocking=True)
        return TokenRange(0, len(values), SampledPositions(values, int(position_ids.max()) + 1))


class LayerGroups:
    """Groups of the layers of a pipeline stage that share terms, by index.

    Args:
        attentions: attention modules of the layers, in order.
    """

    def __init__(self, attentions: Sequence[PositionedAttention]) -> None:
        self._with_tables = _group_layers(attentions, lambda each: (type(each.encoding), type(each.backend)))
        self._with_masks = _group_layers(
            attentions, lambda each: (type(each.backend), each.window, each.encoding.qk_head_dim)
        )
        self._with_processors = _group_layers(
            attentions,
            lambda each: (type(each.encoding), type(each.backend), type(each.processor), each.window),
        )

    def build_context(
        self,
        attentions: Sequence[PositionedAttention],
        segments: tuple[Segment, ...],
        hidden: Tensor,
        *,
        kv_cache: KVCache | None = None,
        num_logits: int | None = None,
        restarted: TokenRange | None = None,
        document_starts: Tensor | None = None,
    ) -> AttentionContext:
        """Compute the shared terms and return them with the other inputs of the layers.

        Args:
            attentions: attention modules of the layers, in order.
            segments: segments of the forward pass.
            hidden: input of the first layer [T, B, D].
            kv_cache: cache of earlier tokens.
            num_logits: number of last positions that the top layer computes, or None for all.
            restarted: positions of all tokens, if they do not follow the segments.
            document_starts: int64 [B, all tokens so far] on the CPU, the column at which each token's document begins.
        """
        tables: dict[int, ScoreTerms] = {}
        terms: dict[int, Any] = {}
        masked: dict[int, tuple[Segment, ...]] = {}
        for group in self._with_tables:
            tables |= _compute_tables([attentions[i] for i in group], segments, hidden.device)
        for group in self._with_processors:
            terms |= _compute_processor_terms([attentions[i] for i in group], segments, tables, hidden)
        if restarted is not None and document_starts is not None:
            for group in self._with_masks:
                masked |= _compute_layer_masks([attentions[i] for i in group], segments, document_starts, hidden)
        length, batch = hidden.shape[:2]
        rows = build_query_rows(attentions, segments, batch, length, hidden.device, restarted)
        return AttentionContext(segments, kv_cache, num_logits, tables, terms, masked, restarted, rows)


def _group_layers(
    attentions: Sequence[PositionedAttention], get_key: Callable[[PositionedAttention], object]
) -> list[list[int]]:
    """Group the indices of layers with equal keys, in the order of each group's first layer."""
    groups: dict[object, list[int]] = {}
    for number, attention in enumerate(attentions):
        groups.setdefault(get_key(attention), []).append(number)
    return list(groups.values())


def _compute_tables(
    attentions: Sequence[PositionedAttention], segments: Sequence[Segment], device: torch.device
) -> dict[int, ScoreTerms]:
    """Compute the tables of layers with the same attention, by layer index.

    Layers that share an encoding share one table; independent heads are computed for all layers at once. The result is
    empty if neither applies or the backend reads no whole table.
    """
    first = attentions[0]
    if first.is_encoding_shared:
        table = first.compute_table(segments, device)
        if table is None:
            return {}
        share = getattr(first.backend, "share_table", None)
        return dict.fromkeys((each.layer_index for each in attentions), table if share is None else share(table))
    if not reads_whole_table(first.backend):
        return {}
    ranges = [(segment.tokens, segment.context) for segment in segments]
    tables = compute_tables_of_layers([each.encoding for each in attentions], ranges, device)
    return {} if tables is None else {a.layer_index: t for a, t in zip(attentions, tables, strict=True)}


def _compute_layer_masks(
    attentions: Sequence[PositionedAttention], segments: tuple[Segment, ...], starts: Tensor, like: Tensor
) -> dict[int, tuple[Segment, ...]]:
    """Compute the document masks once for layers with the same backend, window and length of rotated queries.

    Their recomputation uses the same masks.

    Return the segments with their masks, by layer index.

    Args:
        starts: int64 [B, all tokens so far] on the CPU, the column at which each token's document begins.
        like: tensor with the data type and device of the queries.
    """
    first = attentions[0]
    dropout = first.training and first.config.attention_dropout > 0
    masked = compute_document_masks(
        segments, starts, first.backend, first.encoding, first.window, like, dropout=dropout
    )
    return dict.fromkeys((each.layer_index for each in attentions), masked)


def _compute_processor_terms(
    attentions: Sequence[PositionedAttention],
    segments: Sequence[Segment],
    tables: Mapping[int, ScoreTerms],
    like: Tensor,
) -> dict[int, Any]:
    """Compute the backend's terms of processors and tables for layers with the same attention, by layer index.

    The result is empty if the backend has no such terms, or if a layer makes several calls or calls with some of the
    heads.

    Args:
        tables: tables from `_compute_tables`.
        like: tensor with the data type and device of the queries.
    """
    first, (segment, *others) = attentions[0], segments
    compute = getattr(first.backend, "compute_processor_terms", None)
    sizes = first.groups.mesh.sizes
    is_whole = (
        not others
        and has_no_hidden_keys(segments)
        and segment.document_starts is None
        and segment.tokens.sampled is None
    )
    is_whole = is_whole and sizes.tensor == sizes.context == 1
    if first.processor is None or compute is None or not is_whole:
        return {}
    biases = None
    if first.encoding.adds_bias:
        if any(each.layer_index not in tables for each in attentions):
            return {}
        biases = [tables[each.layer_index].bias for each in attentions]
    processors = [each.processor for each in attentions]
    terms = compute(processors, biases, segment.tokens, segment.context, first.window, like)
    return {} if terms is None else {a.layer_index: t for a, t in zip(attentions, terms, strict=True)}
