"""Terms that layers share in a forward pass: score tables, processor terms, and document masks.

They are computed once before the layers, so that activation recomputation does not repeat them. Layers belong together
if the same call serves them, or if one call computes the terms of several at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.attention.backends.backend import compute_document_masks, reads_whole_table
from megatron.attention.reference import compute_tables_of_layers
from megatron.attention.segments import Segment, has_no_hidden_keys
from megatron.model.attention import AttentionContext, PositionedAttention, build_query_rows
from megatron.model.kv_cache import KVCache
from megatron.position.encoding import ScoreTerms
from megatron.position.token_range import TokenRange


class LayerGroups:
    """Groups of the layers of a pipeline stage that share terms, by index.

    Args:
        attentions: attention modules of the layers, in order.
    """

    def __init__(self, attentions: Sequence[PositionedAttention]) -> None:
        self._with_tables = _group_layers(attentions, lambda each: (type(each.encoding), type(each.backend)))
        self._with_masks = _group_layers(attentions, lambda each: (type(each.backend), each.window))
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
        rows = build_query_rows(attentions, segments, batch, length, hidden.device)
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
    """Compute the document masks of layers with the same backend and window once.

    They are shared by all these layers and by recomputation.

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
