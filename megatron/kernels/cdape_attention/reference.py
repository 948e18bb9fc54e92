"""Plain PyTorch reference of CDAPE attention that materializes the full score matrix; kernels are tested against it.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size, p =
k//2.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.args import CdapeArgs

NEGATIVE_SLOPE = 0.01


def promote_to_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp x to the range of float16 if that is the type. The other types have float32's range."""
    if dtype != torch.float16:
        return x
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


def reference(
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
    q, k, v, bias, w1, b1, w2, b2, offset, window, document_starts, residual_bias, sinks, scale = args
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
    hidden = F.leaky_relu(saturate(hidden, limited), NEGATIVE_SLOPE).masked_fill(~inside, 0)
    processed = saturate(F.conv2d(F.pad(hidden, (padding, 0)), w2.to(dtype), b2.to(dtype)), limited)
    logits = promote_to_float32(scores) + promote_to_float32(processed)
    if bias_map is not None and residual_bias:
        logits = logits + bias_map
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # a key with value zero
        column = sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:3], 1)
        logits, v = torch.cat([logits, column], dim=-1), F.pad(v, (0, 0, 0, 1))
    probabilities = torch.softmax(logits, dim=-1)
    return probabilities.to(dtype) @ v
