"""flash-linear-attention: its plain forgetting attention, with and without a window."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module

REPOSITORY = "fla-org/flash-linear-attention"
NOTES = """\
flash-linear-attention computes the gate's projection in the compute type and the logarithm of its sigmoid in
float32. `fox` also computes the projection in float32, which makes no difference in this float32 table.
It sums gates in float32, `fox` in float64.
"""


def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of its attention operator with our projections."""
    stem = "naive"
    naive = load_module(clone / "fla" / "ops" / "forgetting_attn" / f"{stem}.py")
    generator = torch.Generator().manual_seed(3)
    q, k, v, output = torch.randn(4, WIDTH, WIDTH, generator=generator) * 0.3
    weight, bias = torch.randn(HEADS, WIDTH, generator=generator) * 0.2, torch.randn(HEADS, generator=generator)
    for window in (None, 20):
        ours = build_gpt(pos_emb="fox", pos_emb_per_layer=True, attention_window=window)
        copy_attention(ours, q, k, v, output)
        forget = ours.decoder.layers[0].self_attention.core_attention.position.forget
        with torch.no_grad():
            forget.weight.copy_(weight)
            forget.bias.copy_(bias)

        def attend(x: Tensor, window: int | None = window) -> Tensor:
            heads = (F.linear(x, each).unflatten(-1, (HEADS, -1)) for each in (q, k, v))
            gates = F.logsigmoid(F.linear(x, weight, bias))
            return F.linear(naive.naive_forgetting_attn(*heads, gates, window_size=window).flatten(2), output)

        title = f"fox{'' if window is None else f', window {window}'}: fla's naive_forgetting_attn, one layer"
        yield AttentionComparison(title, ours, attend)
