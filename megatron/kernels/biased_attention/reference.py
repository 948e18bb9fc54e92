"""Plain PyTorch reference that materializes the score matrix; in float64 it is the ground truth for the kernels.

B batch, H heads, R query rows, C key columns, d head dimension, N distances.
"""

import torch
from torch import Tensor


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    *,
    offset: int = 0,
    window: int | None = None,
    document_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(weight(n) · scale · q·k + bias(n) + key_bias) · v; arguments as in `op.biased_attention`."""
    return _attend(q, k, v, bias, weight, key_bias, offset, window, document_starts, sinks, scale)[0]


def logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    *,
    offset: int = 0,
    window: int | None = None,
    document_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the logarithm of the softmax's denominator, [B, H, R]."""
    return _attend(q, k, v, bias, weight, key_bias, offset, window, document_starts, sinks, scale)[1]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    key_bias: Tensor | None,
    offset: int,
    window: int | None,
    document_starts: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    rows = offset + torch.arange(q.shape[2], device=q.device)
    distance = rows[:, None] - torch.arange(k.shape[2], device=q.device)[None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    n = torch.where(visible, distance, 0)
    if document_starts is not None:
        visible = visible & (torch.arange(k.shape[2], device=q.device) >= document_starts[:, None, :, None])
    scores = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if weight is not None:
        scores = scores * weight[:, n]
    if bias is not None:
        scores = scores + bias[:, n]
    if key_bias is not None:
        scores = scores + key_bias[..., None, :]
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # a key with value zero
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, column], -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v), torch.logsumexp(scores, -1)
