"""Reference implementation of attention in plain PyTorch: logits of any block of query rows against any block of keys.

Every backend either calls this or is tested to equal it.

B batch, H heads, h requested heads, R query rows, C key columns, d head dimension, N distances.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.softmax import compute_softmax, compute_stick_breaking
from megatron.position.encoding import Encoding, ScoreTerms, join_heads
from megatron.position.numerics import promote_to_float32, retain_for_capture, soft_cap, toeplitz
from megatron.position.token_range import ALL_HEADS, TokenRange, build_causal_mask, count_distances, select_heads

MAX_BATCHED_ENTRIES = 1 << 24
"""Maximum number of entries of the tables of all layers that are computed at once, 64 MiB."""


ROUND_TO_GRID = 1.5 * 2.0**24
"""Constant that rounds a float64 to a multiple of 2⁻²⁸ if added and subtracted, and leaves the gradient unchanged."""

ROWS_PER_SUM = 256
"""Number of rows added at once to the sums over all rows in a cache."""


def build_distances(count: int, device: torch.device | str | None = None) -> Tensor:
    """Return 0, 1, …, count − 1 as float32, which is exact up to 2²⁴."""
    return torch.arange(count, dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def _cache_distances(count: int, device: torch.device) -> Tensor:
    """Return distances on a GPU, cached for all layers and steps. Do not modify the result."""
    with torch.inference_mode(False):
        return build_distances(count, device)


def compute_table(
    encoding: Encoding, query: TokenRange, key: TokenRange, device: torch.device | str | None = None
) -> ScoreTerms | None:
    """Compute the encoding's table [H, N] over all distances of the rows and columns.

    Returns None if the encoding is not Toeplitz or if positions are continuous.
    """
    return compute_table_of_ranges(encoding, [(query, key)], device)


def compute_table_of_ranges(
    encoding: Encoding, ranges: Iterable[tuple[TokenRange, TokenRange]], device: torch.device | str | None = None
) -> ScoreTerms | None:
    """Compute the encoding's table for several ranges of rows and columns together."""
    if not type(encoding).overrides_hook("table"):
        return None
    ranges = list(ranges)
    if any(query.is_continuous for query, _ in ranges):
        return None  # almost all distances differ
    return encoding.table(_get_distances(max(count_distances(*pair) for pair in ranges), device))


def _get_distances(count: int, device: torch.device | str | None) -> Tensor:
    if not (isinstance(device, torch.device) and device.type == "cuda"):
        return build_distances(count, device)
    distances = _cache_distances(count, device)
    retain_for_capture(distances)
    return distances


def compute_tables_of_layers(
    encodings: Sequence[Encoding], ranges: Iterable[tuple[TokenRange, TokenRange]], device: torch.device | str | None
) -> list[ScoreTerms] | None:
    """Compute the tables of all layers' own encodings at once.

    Returns None if their heads are not independent, or if all tables together are large, because a layer only needs its
    own.
    """
    first = encodings[0]
    ranges = list(ranges)
    if any(query.is_continuous for query, _ in ranges):
        return None
    count = max(count_distances(*pair) for pair in ranges)
    is_large = len(encodings) * first.dims.num_heads * count > MAX_BATCHED_ENTRIES
    if is_large or not (type(first).overrides_hook("table") and first.has_independent_heads):
        return None
    joined = join_heads(encodings).table(_get_distances(count, device))
    terms = (None if term is None else term.split(first.dims.num_heads) for term in joined)
    bias, weight = ([None] * len(encodings) if term is None else term for term in terms)
    return [ScoreTerms(*pair) for pair in zip(bias, weight, strict=True)]


def precompute_terms(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with the terms that all row blocks share: the table and the processor's bias contribution.

    The contribution is omitted if rows do not see all keys from column 0 to their own (a mask, documents, a window or a
    cache that dropped keys), if the bias includes gates, or if positions are sampled.
    """
    table = inputs.table or compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device)
    bias = None if table is None else table.bias
    nothing_hidden = inputs.key_mask is None and inputs.document_starts is None and inputs.window is None
    all_keys_seen = nothing_hidden and inputs.key.start == 0
    contribution = None
    all_keys_seen = all_keys_seen and inputs.key_bias is None  # a key bias differs between sequences
    if inputs.processor is not None and bias is not None and all_keys_seen and inputs.query.sampled is None:
        contribution = inputs.processor.bias_contribution(bias)
    return replace(inputs, table=table, bias_contribution=contribution)


def compute_dense_terms(
    encoding: Encoding,
    query: TokenRange,
    key: TokenRange,
    like: Tensor,
    table: ScoreTerms | None = None,
    heads: slice = ALL_HEADS,
) -> ScoreTerms:
    """Compute bias and weight as matrices [h, R, C], from the table of a Toeplitz encoding or its `dense` hook.

    Args:
        encoding: the encoding.
        query, key: token ranges of rows and columns.
        like: a tensor of the type and on the device of the queries.
        table: the encoding's table over at least these distances, if precomputed.
        heads: the requested heads.
    """
    if table is None:
        table = compute_table(encoding, query, key, like.device)
    if table is None and query.is_continuous and type(encoding).overrides_hook("table"):
        distance = query.positions(like.device)[:, None] - key.positions(like.device)[None, :]
        terms = encoding.table(distance.clamp_(min=0).float().flatten())
        return ScoreTerms(*(None if x is None else select_heads(x, heads).unflatten(1, distance.shape) for x in terms))
    if table is None:
        return encoding.dense(query, key, like, heads)
    return ScoreTerms(*(None if term is None else toeplitz(term[heads], query, key) for term in table))


def sum_gates(gates: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Compute `AttentionInputs.row_bias` and `key_bias` of a segment.

    They are F_i and −F_j, where F is the running sum of its gates.

    A row differs from its nearest keys by less than 1 while F may be tens of thousands, so F is float64. Gates are
    rounded to multiples of 2⁻²⁸, of which float64 adds up 2²⁵ without rounding. A difference is then bitwise identical
    wherever the sum begins: in the whole row, in one of its documents, or in a cache that dropped keys.

    Args:
        gates: float32 [B, H or h, C], gates of the segment's keys (`Encoding.gate`), or None. The start of the sum is
            arbitrary.
        num_rows: R, the number of last tokens that are rows.

    Returns:
        Both tensors, or None twice without gates.
    """
    if gates is None:
        return None, None
    sums = (gates.double() + ROUND_TO_GRID - ROUND_TO_GRID).cumsum(-1)
    return sums[..., sums.shape[-1] - num_rows :], -sums


def add_row_and_key_bias(row_bias: Tensor, key_bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums for all rows and keys, [B, H, R, C], rounded to the type at the end."""
    return (row_bias[..., :, None] + key_bias[..., None, :]).to(dtype)


def compute_visible_mask(inputs: AttentionInputs) -> Tensor:
    """Return the visibility mask, bool [B or 1, 1, R, C]: True if the row sees the key."""
    visible = build_causal_mask(inputs.query, inputs.key, inputs.q.device, inputs.window)[None, None]
    if inputs.document_starts is not None:
        visible = visible & (inputs.key.indices(inputs.q.device) >= inputs.document_starts[:, None, :, None])
    if inputs.key_mask is None:
        return visible
    return visible & (inputs.key_mask[:, None, None] if inputs.key_mask.dim() == 2 else inputs.key_mask[:, None])


def compute_scores_and_bias(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """Compute the unmasked scores [B, h, R, C] and the bias, the two inputs of a processor.

    Scores include weights and contextual terms. The bias is [h, R, C], or [B, h, R, C] if it depends on the sequence,
    or None. With a processor, both cover all heads.

    A soft cap bounds only q·k/√d. Terms that an encoding adds or multiplies, and a processor, come after it, because a
    bias must be free to fall to −∞ with the distance. Contextual terms that read the scores (CoPE's gates) read capped
    ones.
    """
    q, k, encoding, heads = inputs.q, inputs.k, inputs.encoding, inputs.score_heads
    scores = soft_cap(_compute_products(q, k, inputs), inputs.softcap)
    if inputs.dense is not None:
        terms = inputs.dense(inputs.query, inputs.key, q, heads)
    else:
        terms = compute_dense_terms(encoding, inputs.query, inputs.key, q, inputs.table, heads)
    if terms.weight is not None:
        scores = scores * terms.weight.to(scores.dtype)
    contextual = encoding.contextual(q, k, scores, inputs.query, inputs.key, heads)
    if contextual is not None:
        scores = scores + contextual
    bias = terms.bias
    if inputs.row_bias is not None and inputs.key_bias is not None:
        of_sequences = add_row_and_key_bias(
            inputs.row_bias, inputs.key_bias, torch.promote_types(q.dtype, torch.float32)
        )
        bias = of_sequences if bias is None else bias + of_sequences
    return scores, bias


def _compute_products(q: Tensor, k: Tensor, inputs: AttentionInputs) -> Tensor:
    """Compute q·k/√e [B, h, R, C] of rotated queries and keys of length e.

    If there are two rotations, this includes that of the distance.
    """

    def multiply(q: Tensor, k: Tensor) -> Tensor:
        return torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))

    far_distance = inputs.encoding.far_distance
    if far_distance is None:
        return multiply(q, k)
    near, far = (multiply(*halves) for halves in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True))
    distance = inputs.query.indices(q.device)[:, None] - inputs.key.indices(q.device)[None, :]
    return torch.where(distance < far_distance, near, far)


def compute_row_terms(inputs: AttentionInputs) -> Tensor:
    """Compute what each row adds to the sums over rows above that a processor reads: float32 [B, R, C]."""
    processor = inputs.processor
    assert processor is not None
    heads = processor.summed_heads
    q, k, row_bias, key_bias = (
        x if x is None or heads == ALL_HEADS else x[:, heads]
        for x in (inputs.q, inputs.k, inputs.row_bias, inputs.key_bias)
    )
    assert q is not None
    assert k is not None
    own = replace(inputs, q=q, k=k, row_bias=row_bias, key_bias=key_bias, processor=None, heads=heads)
    scores, bias = compute_scores_and_bias(own)
    return processor.row_terms(scores, bias, compute_visible_mask(inputs), inputs.query, inputs.key)


def add_row_terms(row_sums: Tensor, block: AttentionInputs, first_key: int) -> Tensor:
    """Add the terms of a block's rows to the sums [B, C], whose first column is the key at index `first_key`."""
    total = compute_row_terms(block).sum(1)
    left = block.key.start - first_key
    return row_sums + torch.nn.functional.pad(total, (left, row_sums.shape[1] - left - total.shape[1]))


def compute_row_sums(
    inputs: AttentionInputs, size: int | None = None, add: Callable[..., Tensor] | None = None
) -> Tensor:
    """Compute the sums over all rows above that a processor reads: float32 [B, C].

    Args:
        size: rows above per block; all at once if None.
        add: replacement for `add_row_terms`.
    """
    sums = inputs.row_sums
    if sums is None:
        sums = promote_to_float32(inputs.q.new_zeros(len(inputs.q), inputs.key.length))
    if inputs.preceding_q is None:
        return sums
    count = inputs.preceding_q.shape[2]
    query = replace(inputs.query, start=inputs.query.start - count, length=count)
    row_bias = None if inputs.row_bias is None else inputs.select_preceding_row_bias()
    above = replace(inputs, q=inputs.preceding_q, query=query, row_bias=row_bias, preceding_q=None)
    for start in range(0, count, size or count):
        block = above.select_rows(start, min(start + (size or count), count), sums)
        sums = (add or add_row_terms)(sums, block, inputs.key.start)
    return sums


def compute_following_row_sums(inputs: AttentionInputs) -> Tensor:
    """Compute the sums of `row_terms` over these rows and all rows above, for the row after them: float32 [B, C]."""
    rows = inputs.prepend_preceding_rows()
    following = replace(rows.query, start=rows.query.stop, length=0)
    none = replace(rows, q=rows.q[:, :, :0], query=following, preceding_q=rows.q)
    if rows.row_bias is not None:
        none = replace(none, row_bias=rows.row_bias[:, :, :0])
    return compute_row_sums(none, ROWS_PER_SUM)


def compute_logits(inputs: AttentionInputs) -> Tensor:
    """Compute masked logits of the query rows, float32 [B, h, R, C], −inf for hidden columns.

    They are the inputs of the softmax.

    The bias is added after scaling by 1/√d, as in KERPLE's released code (in its equation 2 it is inside).
    """
    if inputs.processor is not None and inputs.processor.reads_preceding_rows:
        return _compute_logits_of_rows(inputs)[:, :, -inputs.query.length :]
    return _compute_logits(inputs)


def _compute_logits_of_rows(inputs: AttentionInputs) -> Tensor:
    """Compute the logits of a processor that reads rows above, including the rows above that it reads."""
    processor = inputs.processor
    assert processor is not None
    if not processor.overrides("row_terms"):
        return _compute_logits(inputs.prepend_preceding_rows())
    own = replace(inputs, preceding_q=None)
    # Sum over the rows above each row, excluding the row itself.
    totals = compute_row_terms(own).cumsum(1)
    sums = compute_row_sums(inputs)[:, None] + torch.nn.functional.pad(totals[:, :-1], (0, 0, 1, 0))
    return processor.apply_row_sums(_compute_logits(own), sums)


def _compute_logits(inputs: AttentionInputs) -> Tensor:
    scores, bias = compute_scores_and_bias(inputs)
    visible = compute_visible_mask(inputs)
    if inputs.processor is not None:
        contribution = inputs.bias_contribution
        rows = None if contribution is None else contribution.select_rows(inputs.query, inputs.key.length)
        # If a row's logits depend on nothing before its first visible key, the mask is sufficient.
        edge = {}
        if inputs.document_starts is not None and inputs.processor.left_context > 0:
            edge = {"first_columns": inputs.document_starts - inputs.key.start}
        logits = inputs.processor(scores, bias, visible, inputs.heads, rows, **edge)
        return logits.masked_fill_(~visible, float("-inf"))
    # Combine mask and bias before the bias gets a batch dimension: one pass over the scores instead of two.
    mask = torch.zeros(visible.shape, device=inputs.q.device).masked_fill_(~visible, float("-inf"))
    return promote_to_float32(scores) + (mask if bias is None else mask + bias)


def compute_weights(inputs: AttentionInputs) -> Tensor:
    """Compute attention weights of the query rows before dropout: float32 [B, h, R, C], 0 for hidden columns.

    A row that sees no key (a padding query) has zero weights.
    """
    processor = inputs.processor
    if processor is None or not processor.overrides("process_weights"):
        return _weigh_logits(compute_logits(inputs), inputs)
    rows = inputs.prepend_preceding_rows() if processor.preceding_rows else inputs
    all_heads = replace(rows, heads=ALL_HEADS)
    logits = _compute_logits(all_heads) if processor.preceding_rows else compute_logits(all_heads)
    weights = _weigh_logits(logits, all_heads)
    processed = processor.process_weights(weights, compute_visible_mask(rows), inputs.heads)
    return processed[:, :, -inputs.query.length :]


def _weigh_logits(logits: Tensor, inputs: AttentionInputs) -> Tensor:
    """Compute weights from masked logits of the requested heads, before a processor changes them."""
    if inputs.uses_stick_breaking:
        device = inputs.q.device
        own = inputs.query.indices(device)[:, None] == inputs.key.indices(device)
        # A padding query does not see its own key.
        remainder = own & (logits > float("-inf")) if inputs.adds_remainder else None
        return compute_stick_breaking(logits.masked_fill(own, float("-inf")), remainder)
    weights = compute_softmax(logits, inputs.head_sinks)
    return weights if inputs.key_mask is None else weights.nan_to_num(0.0)


def apply_weights(weights: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute weights · v.

    Args:
        weights: float32 [B, H, R, C].
        v: values [B, H, C, d].
        dropout: probability of dropping an attention weight; 0 outside training.

    Returns:
        [B, H, R, d] in the type of v.
    """
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return torch.matmul(weights.to(v.dtype), v)


def compute_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention of all rows at once with the full score matrix materialized: [B, h, R, d]."""
    output = apply_weights(compute_weights(inputs), inputs.v, inputs.dropout)
    processor = inputs.processor
    if processor is not None and processor.overrides("process_output"):
        return processor.process_output(output)
    return output


def compute_attention_in_blocks(
    inputs: AttentionInputs,
    size: int,
    compute_block: Callable[[AttentionInputs], Tensor] = compute_attention,
    add: Callable[..., Tensor] = add_row_terms,
) -> Tensor:
    """Compute attention in blocks of `size` rows, each against its causal columns. Shared terms are computed once.

    Args:
        compute_block, add: replacements for `compute_attention` and `add_row_terms`.
    """
    inputs = precompute_terms(inputs)
    blocks: Iterable[AttentionInputs] = iter_row_blocks(inputs, size)
    if inputs.processor is not None and inputs.processor.overrides("row_terms"):
        blocks = _iter_blocks_with_sums(inputs, size, add)
    if torch.is_grad_enabled():
        # Autograd runs in reverse order of the operations. If a block's columns are selected right before the block is
        # computed, their gradients are accumulated right after its own, before those of the next block exist.
        outputs = [compute_block(block) for block in blocks]
    else:
        # The last block has the most columns. Without a backward pass it runs first, so that memory allocated for its
        # maps serves all others. In rising order each block would be slightly too large for the memory of the previous
        # one, and memory would grow with T².
        outputs = [compute_block(block) for block in reversed(list(blocks))][::-1]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _iter_blocks_with_sums(inputs: AttentionInputs, size: int, add: Callable[..., Tensor]) -> Iterator[AttentionInputs]:
    """Yield row blocks with the sums over all rows above instead of the rows above."""
    sums, total = compute_row_sums(inputs, size, add), inputs.query.length
    for start in range(0, total, size):
        block = inputs.select_rows(start, min(start + size, total), sums)
        yield block
        if start + size < total:
            sums = add(sums, block, inputs.key.start)
