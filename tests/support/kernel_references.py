"""Plain PyTorch references of the operators in `megatron/kernels/`; in float64 they are the ground truth for tests.

They materialize the full score matrix. Arguments and results are those of the operators of the same names.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, W width of FIRE's network, D width of
CDAPE's processor, k kernel size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.bias_term import promote_to_float32, saturate

NEGATIVE_SLOPE = 0.01
"""Slope of CDAPE's LeakyReLU for negative values."""


def _compute_distances(rows: int, columns: int, offset: int, device: torch.device) -> Tensor:
    return offset + torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)[None, :]


def toeplitz_bias(
    table: Tensor,
    rows: int,
    columns: int,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """Return the result of `toeplitz.toeplitz_bias`; values too large for `dtype` are not saturated here."""
    n = _compute_distances(rows, columns, offset, table.device)
    return torch.where(n < 0, above, table[:, n.clamp(min=0)]).to(dtype)


def fire_bias(
    c: Tensor,
    multiplier: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    rows: int,
    columns: int,
    *,
    half_length: float,
    offset: int = 0,
    first_column: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """Return the result of `fire.fire_bias` (FIRE: Li et al. 2023, equation 3)."""
    n = _compute_distances(rows, columns, offset, c.device)
    i = (first_column + offset + torch.arange(rows, device=c.device)).to(c.dtype)
    normalizer = torch.log1p(c * torch.maximum(multiplier * half_length, i)) + 1e-6
    x = torch.log1p(c * n.clamp(min=0)) / normalizer[:, None]
    hidden = torch.relu(F.linear(x[..., None], weight1, bias1))
    bias = F.linear(hidden, weight2, bias2).permute(2, 0, 1)
    return torch.where(n < 0, above, bias).to(dtype)


def biased_attention(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Return the result of `op.biased_attention`, with its arguments."""
    return biased_attention_with_lse(*tensors, **options)[0]


def biased_attention_with_lse(
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
) -> tuple[Tensor, Tensor]:
    """Return softmax(weight(n) · scale · q·k + bias(n) + key_bias) · v, and the logarithm of each row's denominator."""
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
        scores, v = torch.cat([scores, column], -1), F.pad(v, (0, 0, 0, 1))
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v), torch.logsumexp(scores, -1)


def cdape_attention(
    args: CdapeArgs,
    *,
    saturate_like: torch.dtype | None = None,
    row_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(S + bias + Conv2(LeakyReLU(Conv1([S, bias])))) · v (DAPE V2, equation 5).

    The key axis is padded with zeros. Arguments and result are those of `op.cdape_attention`, in any floating type
    including float64. `saturate_like` is the type whose largest value bounds the hidden map, q's if None: float64 can
    then compute the exact result for float16. With `row_bias` [B, H, R] and `key_bias` [B, H, C] the bias is their sum,
    as in `gated_op.attend_with_gates`, and does not saturate.
    """
    q, k, v, bias, w1, b1, w2, b2, offset, window, document_starts, residual_bias, sinks, scale, *_ = args
    rows, columns, dtype = q.shape[2], k.shape[2], q.dtype
    limited = dtype if saturate_like is None else saturate_like
    padding = w1.shape[-1] // 2
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    distance = offset + torch.arange(rows, device=q.device)[:, None] - torch.arange(columns, device=q.device)
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    inside = torch.ones((), dtype=torch.bool, device=q.device)
    if document_starts is not None:
        inside = torch.arange(columns + padding, device=q.device) >= document_starts[:, None, :, None]
        visible = visible & inside[..., :columns]
    scores = (q * scale) @ k.transpose(-1, -2)
    channels = scores.masked_fill(~visible, 0)
    bias_map = None
    if bias is not None:
        bias_map = bias[:, distance.clamp(min=0)]
        seen_by_conv1 = saturate(bias_map, limited)
    elif row_bias is not None and key_bias is not None:
        bias_map = seen_by_conv1 = row_bias[..., None] + key_bias[..., None, :]
    if bias_map is not None:
        visible_bias = seen_by_conv1.to(dtype).expand_as(scores).masked_fill(~visible, 0)
        channels = torch.cat([channels, visible_bias], dim=1)
    # Padded on the right by p more than the convolution needs, so that hidden values there are computed.
    hidden = F.conv2d(F.pad(channels, (padding, 2 * padding)), w1.to(dtype), b1.to(dtype))
    slope = 1.0 if args.is_linear else NEGATIVE_SLOPE
    hidden = F.leaky_relu(saturate(hidden, limited), slope).masked_fill(~inside, 0)
    processed = saturate(F.conv2d(F.pad(hidden, (padding, 0)), w2.to(dtype), b2.to(dtype)), limited)
    logits = promote_to_float32(scores) + promote_to_float32(processed)
    if bias_map is not None and residual_bias:
        logits = logits + bias_map
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # a key with value zero
        column = sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:3], 1)
        logits, v = torch.cat([logits, column], dim=-1), F.pad(v, (0, 0, 0, 1))
    probabilities = torch.softmax(logits, dim=-1)
    if args.head_map is not None:
        probabilities = probabilities + torch.einsum("hg,bgij->bhij", args.head_map, probabilities)
    return probabilities.to(dtype) @ v
