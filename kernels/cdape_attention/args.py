"""What calls of the operator must be like, wherever they are computed. Neither Triton nor a compiler is asked for.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class CdapeArgs(NamedTuple):
    """A call of the operator, wherever it is computed.

    Row r stands at position offset + r of the columns and sees columns offset + r − window + 1 … offset + r; others
    count as zero for Conv1. Where a cache has dropped columns, the p columns before the first one that a row sees must
    still be there; column 0 is the left edge.
    """

    q: Tensor
    """Queries [B, H, R, d], rotated by the caller if at all."""
    k: Tensor
    """[B, H, C, d] of q's type, C ≥ offset + R; later columns are not read."""
    v: Tensor
    """As k."""
    bias: Tensor | None
    """float32 [H, N] over distances n = i − j, N ≥ offset + R, or None."""
    w1: Tensor
    """Conv1 [D, 2H, 1, k] (scores first; [D, H, 1, k] without a bias), k odd."""
    b1: Tensor
    """[D]."""
    w2: Tensor
    """Conv2 [H, D, 1, k]."""
    b2: Tensor
    """[H]; without sinks its gradient is zero: it has no effect under the softmax (unless float16 saturates)."""
    offset: int = 0
    window: int | None = None
    first_keys: Tensor | None = None
    """int32 [B, R], or None where it is 0: the column at which each row's document begins, at most offset + r and never
    falling from row to row. It is the row's left edge, as column 0 is without: what lies before is outside, of both
    convolutions too. Its values are not checked, which would wait for a GPU."""
    residual_bias: bool = True
    """Whether the bias is added to the logits too."""
    sinks: Tensor | None = None
    """float32 [H], or None: of each head a logit that joins those of every row's keys and has no value."""
    scale: float | None = None
    """Of q·k, 1/√d if None."""


def check_shapes(args: CdapeArgs) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: shapes that do not fit each other, with what they must be.
    """
    q, k, v, bias, w1, b1, w2, b2, offset, window, first_keys, _, sinks, _ = args
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
    if first_keys is not None and (first_keys.shape != (batch, rows) or first_keys.dtype != torch.int32):
        raise ValueError(
            f"first_keys is {first_keys.dtype} {list(first_keys.shape)}; it must be torch.int32 [{batch}, {rows}]"
        )
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] < offset + rows):
        raise ValueError(f"bias is {list(bias.shape)}; it must be [{heads}, N] with N ≥ offset + R = {offset + rows}")
    if bias is not None and bias.dtype != torch.float32:
        raise ValueError(f"bias is {bias.dtype}; it must be float32")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks is {sinks.dtype} {list(sinks.shape)}; it must be torch.float32 [{heads}]")
    inputs = heads if bias is None else 2 * heads
    width, size = w1.shape[0], w1.shape[-1]
    if w1.shape != (width, inputs, 1, size) or width < 1 or size % 2 == 0:
        raise ValueError(f"w1 is {list(w1.shape)}; it must be [D, {inputs}, 1, k] with D at least 1 and k odd")
    if b1.shape != (width,) or w2.shape != (heads, width, 1, size) or b2.shape != (heads,):
        raise ValueError(
            f"b1, w2 and b2 are {list(b1.shape)}, {list(w2.shape)} and {list(b2.shape)}; "
            f"they must be [{width}], [{heads}, {width}, 1, {size}] and [{heads}]"
        )
