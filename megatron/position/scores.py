"""The attention contract in executable form: the logits of any block of query rows against any block of keys.

B batch, H heads, R query rows, C key columns, d head dimension, N distances.
Every backend either calls this or is tested to equal it.
"""

from typing import Any

import torch
from torch import Tensor

from .encoding import Encoding, Terms
from .processor import Processor
from .shape import ALL_HEADS, Span, at_least_float32, causal, distance_count


class _Toeplitz(torch.autograd.Function):
    """table [H, N] → matrix [H, R, C] with matrix[h, r, c] = table[h, i − j], and the table's first entry where j > i.

    Backward sums along diagonals by shearing the gradient, which is a plain reduction: no scatter, hence fast on CPU
    and deterministic on GPUs.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, query: Span, key: Span) -> Tensor:
        ctx.query, ctx.key, ctx.size = query, key, table.shape[-1]
        distance = query.places(table.device)[:, None] - key.places(table.device)[None, :]
        return table[:, distance.clamp_(min=0)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        heads, rows, columns = grad.shape
        # Row r is moved right by rows − 1 − r, so that equal i − j stand in one column of width rows + columns − 1:
        # column m then holds the distance n = offset + (columns − 1) − m.
        width = rows + columns - 1
        sheared = torch.nn.functional.pad(grad.flip(1), (0, rows))  # [H, R, C + R]
        sheared = sheared.reshape(heads, -1)[:, : rows * width].view(heads, rows, width)
        diagonal = sheared.sum(1).flip(-1)  # index m' ↔ n = m' + (first row − last column)
        first = ctx.query.start - (ctx.key.stop - 1)
        result = grad.new_zeros(heads, ctx.size)
        negative = min(max(-first, 0), width)  # entries with n < 0 read table[0]
        result[:, 0] += diagonal[:, :negative].sum(-1)
        start = first + negative
        result[:, start : start + width - negative] += diagonal[:, negative:]
        return result, None, None


def toeplitz(table: Tensor, query: Span, key: Span) -> Tensor:
    """Spread a table over n = i − j into a matrix [H, R, C]; entries with j > i hold the table's value at n = 0.

    Args:
        table: [H, N] with N > the largest distance.
    """
    if query.drawn is None:
        return _Toeplitz.apply(table, query, key)
    # Drawn positions leave no diagonals to sum along.
    distance = query.positions(table.device)[:, None] - key.positions(table.device)[None, :]
    return table.index_select(1, distance.clamp_(min=0).flatten()).unflatten(1, distance.shape)


def distances(count: int, device: torch.device | str | None = None) -> Tensor:
    """0, 1, …, count − 1 as float32, which is exact up to 2²⁴."""
    return torch.arange(count, dtype=torch.float32, device=device)


def table_for(encoding: Encoding, query: Span, key: Span, device: torch.device | str | None = None) -> Terms | None:
    """The encoding's table [H, N] over every distance that occurs, or None for one that is not Toeplitz."""
    if not type(encoding).overrides("table"):
        return None
    return encoding.table(distances(distance_count(query, key), device))


def dense_terms(
    encoding: Encoding, table: Terms | None, query: Span, key: Span, like: Tensor, heads: slice = ALL_HEADS
) -> Terms:
    """Bias and weight as matrices [h, R, C], from the table of a Toeplitz encoding or from its `dense` hook."""
    if table is None:
        return encoding.dense(query, key, like, heads)
    return Terms(*(None if t is None else toeplitz(t[heads], query, key) for t in table))


def logits(
    q: Tensor,
    k: Tensor,
    query: Span,
    key: Span,
    encoding: Encoding,
    processor: Processor | None,
    table: Terms | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    heads: slice = ALL_HEADS,
) -> Tensor:
    """Masked logits of the query rows against the keys, ready for the softmax.

    The bias is added after the scaling by 1/√d, as KERPLE's released code does (its equation 2 has it inside).

    Args:
        q: rotated queries [B, H, R, d] of all heads with a processor, else of the wanted ones, [B, h, R, d].
        k: rotated keys [B, H or h, C, d].
        query, key: where they stand.
        table: `table_for(…)` of these rows and columns or of more, [H, N], for encodings that have one.
        key_mask: bool [B, C] or [B, R, C], False for padding and keys of another document.
        window: a row sees the last `window` keys only, its own included.
        heads: the heads whose logits are wanted, h of them.

    Returns:
        float32 [B, h, R, C], −inf where the row may not see the column.
    """
    asked = ALL_HEADS if processor is not None else heads  # a processor reads the scores of all heads
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    terms = dense_terms(encoding, table, query, key, q, asked)
    if terms.weight is not None:
        scores = scores * terms.weight.to(scores.dtype)
    contextual = encoding.contextual(q, k, scores, query, key, asked)
    if contextual is not None:
        scores = scores + contextual
    visible = causal(query, key, q.device, window)[None, None]
    if key_mask is not None:
        visible = visible & (key_mask[:, None, None, :] if key_mask.dim() == 2 else key_mask[:, None])
    if processor is not None:
        return processor(scores, terms.bias, visible, heads).masked_fill(~visible, float("-inf"))
    # The mask joins the bias while that is still without a batch dimension: one pass over the scores instead of two.
    mask = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, float("-inf"))
    return at_least_float32(scores) + (mask if terms.bias is None else mask + terms.bias)


def attend(logits: Tensor, v: Tensor, dropout: float = 0.0, rows_may_be_empty: bool = False) -> Tensor:
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
