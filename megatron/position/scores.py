"""The attention contract in executable form: the logits of any block of query rows against any block of keys.

B batch, H heads, R query rows, C key columns, d head dimension, N distances.
Every backend either calls this or is tested to equal it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .encoding import Encoding, ScoreTerms
from .processor import BiasContribution, Processor
from .shape import ALL_HEADS, PositionRange, causal_mask, count_distances, promote_to_float32
from .toeplitz import toeplitz

DenseFunction = Callable[[PositionRange, PositionRange, Tensor, slice], ScoreTerms]
"""Computes what `EncodingCost.dense` computes, from the same arguments: a kernel may do it in the encoding's stead."""


def arange_distances(count: int, device: torch.device | str | None = None) -> Tensor:
    """0, 1, …, count − 1 as float32, which is exact up to 2²⁴."""
    return torch.arange(count, dtype=torch.float32, device=device)


def compute_table(
    encoding: Encoding, query: PositionRange, key: PositionRange, device: torch.device | str | None = None
) -> ScoreTerms | None:
    """The encoding's table [H, N] over every distance that occurs, or None for one that is not Toeplitz."""
    if not type(encoding).overrides_hook("table"):
        return None
    return encoding.table(arange_distances(count_distances(query, key), device))


def compute_bias_contribution(
    processor: Processor | None,
    table: ScoreTerms | None,
    query: PositionRange,
    key: PositionRange,
    key_mask: Tensor | None = None,
    window: int | None = None,
) -> BiasContribution | None:
    """The bias's own share of the processor, or None where it has none or keys are hidden that stand before a row."""
    plain = key_mask is None and window is None and query.sampled is None and key.start == 0
    if processor is None or table is None or table.bias is None or not plain:
        return None
    return processor.bias_contribution(table.bias)


def compute_dense_terms(
    encoding: Encoding,
    table: ScoreTerms | None,
    query: PositionRange,
    key: PositionRange,
    like: Tensor,
    heads: slice = ALL_HEADS,
    dense: DenseFunction | None = None,
) -> ScoreTerms:
    """Bias and weight as matrices [h, R, C], from the table of a Toeplitz encoding or from its `dense` hook (or
    `dense`, which computes the same)."""
    if table is None:
        return (dense or encoding.dense)(query, key, like, heads)
    return ScoreTerms(*(None if t is None else toeplitz(t[heads], query, key) for t in table))


def visibility_mask(
    query: PositionRange,
    key: PositionRange,
    device: torch.device | str | None = None,
    window: int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Bool [B or 1, 1, R, C]: may the row see the key? Arguments as in `logits`."""
    visible = causal_mask(query, key, device, window)[None, None]
    if key_mask is None:
        return visible
    return visible & (key_mask[:, None, None] if key_mask.dim() == 2 else key_mask[:, None])


def compute_scores_and_bias(
    q: Tensor,
    k: Tensor,
    query: PositionRange,
    key: PositionRange,
    encoding: Encoding,
    table: ScoreTerms | None = None,
    heads: slice = ALL_HEADS,
    dense: DenseFunction | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What a processor reads, or what is added up without one: the weighted and contextual scores [B, h, R, C], and
    the bias [h, R, C] if there is one. Arguments as in `logits`; nothing is masked."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    terms = compute_dense_terms(encoding, table, query, key, q, heads, dense)
    if terms.weight is not None:
        scores = scores * terms.weight.to(scores.dtype)
    contextual = encoding.contextual(q, k, scores, query, key, heads)
    if contextual is not None:
        scores = scores + contextual
    return scores, terms.bias


def attention_logits(
    q: Tensor,
    k: Tensor,
    query: PositionRange,
    key: PositionRange,
    encoding: Encoding,
    processor: Processor | None,
    table: ScoreTerms | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    heads: slice = ALL_HEADS,
    bias_contribution: BiasContribution | None = None,
    dense: DenseFunction | None = None,
) -> Tensor:
    """Masked logits of the query rows against the keys, ready for the softmax.

    The bias is added after the scaling by 1/√d, as KERPLE's released code does (its equation 2 has it inside).

    Args:
        q: rotated queries [B, H, R, d] of all heads with a processor, else of the wanted ones, [B, h, R, d].
        k: rotated keys [B, H or h, C, d].
        query, key: where they stand.
        table: `compute_table(…)` of these rows and columns or of more, [H, N], for encodings that have one.
        key_mask: bool [B, C] or [B, R, C], False for padding and keys of another document.
        window: a row sees the last `window` keys only, its own included.
        heads: the heads whose logits are wanted, h of them.
        bias_contribution: `compute_bias_contribution(…)`, computed once for many blocks of rows.
        dense: computes the encoding's matrices in its stead.

    Returns:
        float32 [B, h, R, C], −inf where the row may not see the column.
    """
    asked = ALL_HEADS if processor is not None else heads  # a processor reads the scores of all heads
    scores, bias = compute_scores_and_bias(q, k, query, key, encoding, table, asked, dense)
    visible = visibility_mask(query, key, q.device, window, key_mask)
    if processor is not None:
        of_rows = None if bias_contribution is None else bias_contribution.for_rows(query, key.length)
        return processor(scores, bias, visible, heads, of_rows).masked_fill_(~visible, float("-inf"))
    # The mask joins the bias while that is still without a batch dimension: one pass over the scores instead of two.
    mask = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, float("-inf"))
    return promote_to_float32(scores) + (mask if bias is None else mask + bias)


def softmax_attend(logits: Tensor, v: Tensor, dropout: float = 0.0, rows_may_be_empty: bool = False) -> Tensor:
    """softmax(logits) · v, with the softmax in float32.

    Args:
        logits: float32 [B, H, R, C].
        v: values [B, H, C, d].
        dropout: probability of dropping an attention weight; 0 outside training.
        rows_may_be_empty: a row that sees no key (a padding query) gives zero instead of NaN.

    Returns:
        [B, H, R, d] in the type of v.
    """
    probabilities = torch.softmax(logits, dim=-1)
    if rows_may_be_empty:
        probabilities = probabilities.nan_to_num(0.0)
    if dropout:
        probabilities = torch.nn.functional.dropout(probabilities, dropout)
    return torch.matmul(probabilities.to(v.dtype), v)
