"""Arguments of the operator and their checks, shared by all implementations. Needs neither Triton nor a compiler.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MIN_MAPPED_ROWS = 8
"""Minimum number of query rows of a sequence for which the kernels of a map after the softmax are used.

A program takes a whole row of all heads, so a decoding step would occupy a single multiprocessor.
"""


class CdapeArgs(NamedTuple):
    """Arguments of one call of the operator, on any device.

    Row r is at position offset + r of the columns and attends to columns offset + r − window + 1 … offset + r. Other
    columns count as zero for Conv1. If a cache has dropped columns, it must still contain the p columns before the
    first one that a row attends to. Column 0 is the left edge.
    """

    q: Tensor
    """Queries [B, H, R, d], after any rotation."""
    k: Tensor
    """Keys [B, H, C, d] of q's type, C ≥ offset + R; later columns are not read."""
    v: Tensor
    """Values, like k."""
    bias: Tensor | None
    """Bias table, float32 [H, N] over distances n = i − j, N ≥ offset + R, or None."""
    w1: Tensor
    """Conv1 [D, 2H, 1, k] (scores first; [D, H, 1, k] without a bias), k odd."""
    b1: Tensor
    """Bias of Conv1 [D]."""
    w2: Tensor
    """Conv2 [H, D, 1, k]."""
    b2: Tensor
    """Bias of Conv2 [H]. Without sinks its gradient is zero: softmax cancels it (unless float16 saturates)."""
    offset: int = 0
    window: int | None = None
    document_starts: Tensor | None = None
    """Column at which each row's document begins, int32 [B, R]; None means 0.

    It must be nondecreasing and at most offset + r. It is the row's left edge, as column 0 is without documents:
    earlier columns are padding, also for both convolutions. Values are not checked, because that would synchronize with
    the GPU.
    """
    residual_bias: bool = True
    """True if the bias is also added to the logits."""
    sinks: Tensor | None = None
    """One logit per head, float32 [H], that joins those of every row's keys and has no value; or None."""
    scale: float | None = None
    """Factor of q·k; None means 1/√d."""
    is_linear: bool = False
    """True to omit LeakyReLU between both convolutions."""
    head_map: Tensor | None = None
    """Difference from the identity of a map between the heads, float32 [H, H], or None.

    It maps the attention weights after the softmax: head h uses P_h + Σ_g head_map[h, g]·P_g. Sinks are not mapped.
    """


def check_shapes(args: CdapeArgs) -> None:
    """Check that the shapes and types of the arguments are valid.

    Raises:
        ValueError: if they do not match, with the expected ones.
    """
    q, k, v, bias, w1, b1, w2, b2, offset, window, document_starts, _, sinks, *_ = args
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q is {list(q.shape)} and k {list(k.shape)}; they must be [B, H, R, d] and [B, H, C, d]")
    batch, heads, rows, dim = q.shape
    if min(batch, heads, rows, dim) < 1:
        raise ValueError(f"q is {list(q.shape)}; no size may be 0")
    columns = k.shape[2]
    if k.shape != (batch, heads, columns, dim) or v.shape != k.shape:
        raise ValueError(
            f"k is {list(k.shape)} and v {list(v.shape)}; they must be [B, H, C, d], here [{batch}, {heads}, C, {dim}]"
        )
    if offset < 0 or columns < offset + rows:
        raise ValueError(
            f"offset is {offset} with {rows} rows and {columns} columns; it must be from 0 to {columns - rows}, "
            "so that every row finds its own key"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None")
    if document_starts is not None and (document_starts.shape != (batch, rows) or document_starts.dtype != torch.int32):
        raise ValueError(
            f"document_starts is {document_starts.dtype} {list(document_starts.shape)}; it must be torch.int32 "
            f"[{batch}, {rows}]"
        )
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] < offset + rows):
        raise ValueError(f"bias is {list(bias.shape)}; it must be [{heads}, N] with N ≥ offset + R = {offset + rows}")
    if bias is not None and bias.dtype != torch.float32:
        raise ValueError(f"bias is {bias.dtype}; it must be float32")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks is {sinks.dtype} {list(sinks.shape)}; it must be torch.float32 [{heads}]")
    if (head_map := args.head_map) is not None and (
        head_map.shape != (heads, heads) or head_map.dtype != torch.float32
    ):
        raise ValueError(
            f"head_map is {head_map.dtype} {list(head_map.shape)}; it must be torch.float32 [{heads}, {heads}]"
        )
    inputs = heads if bias is None else 2 * heads
    width, size = w1.shape[0], w1.shape[-1]
    if w1.shape != (width, inputs, 1, size) or width < 1 or size % 2 == 0:
        raise ValueError(f"w1 is {list(w1.shape)}; it must be [D, {inputs}, 1, k] with D at least 1 and k odd")
    if b1.shape != (width,) or w2.shape != (heads, width, 1, size) or b2.shape != (heads,):
        raise ValueError(
            f"b1, w2 and b2 are {list(b1.shape)}, {list(w2.shape)} and {list(b2.shape)}; "
            f"they must be [{width}], [{heads}, {width}, 1, {size}] and [{heads}]"
        )
