"""x-transformers: its rotary embedding with the factors of xPos, and its polar embedding (PoPE)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.methods.comparison import (
    HEADS,
    WIDTH,
    AttentionComparison,
    build_gpt,
    copy_attention,
    load_module,
    pair_adjacent_numbers,
)

REPOSITORY = "lucidrains/x-transformers"
NOTES = """\
x-transformers rotates adjacent elements of a head together; the rows use our weights in its order.
The factors of its xPos are centered on the current sequence, ours on the final sequence length, which decoding
requires; the scores are equal.
Its polar bias applies to keys, and δ of `pope` to queries with the opposite sign. The scores are equal, and this also
works with grouped queries.
"""
MISSING = (
    "einx", "loguru", "torch_einops_utils", "torch_einops_utils.nn", "x_transformers", "x_transformers.attend",
    "x_transformers.autoregressive_wrapper",
)  # fmt: skip
"""Modules that its file imports but its embeddings do not use."""

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def build_attention(rotate: Rotate, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> Callable[[Tensor], Tensor]:
    """Build plain attention with projections [D, D]. The published `rotate` rotates queries and keys [B, H, T, d]."""

    def attend(x: Tensor) -> Tensor:
        heads = [(x @ weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for weight in (q, k, v)]
        turned_q, turned_k = rotate(heads[0], heads[1])
        scores = turned_q @ turned_k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (probabilities @ heads[2]).transpose(1, 2).flatten(2) @ output.T

    return attend


def draw_projections(size: float = 0.3) -> list[Tensor]:
    """Return random projections [D, D] of queries, keys, values and the output, for attention far from uniform."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(WIDTH, WIDTH, generator=generator) * size for _ in range(4)]


@torch.no_grad()
def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of one attention layer."""
    stem, (q, k, v, output) = "x_transformers", draw_projections()
    module = load_module(clone / stem / f"{stem}.py", missing=MISSING)
    for scale_base in (512, 16):
        rotary: nn.Module = module.RotaryEmbedding(WIDTH // HEADS, use_xpos=True, scale_base=scale_base)

        def rotate(q: Tensor, k: Tensor, rotary: nn.Module = rotary) -> tuple[Tensor, Tensor]:
            frequencies, scale = rotary.forward_from_seq_len(q.shape[2])  # type: ignore[operator]
            turn = module.apply_rotary_pos_emb
            return turn(q, frequencies, scale), turn(k, frequencies, scale**-1.0)

        ours = build_gpt(pos_emb="rotary", pos_emb_options={"xpos": True, "xpos_scale_base": float(scale_base)})
        copy_attention(ours, *(pair_adjacent_numbers(x) for x in (q, k)), v, output)
        title = f"rotary, xpos, base {scale_base}: x-transformers' {stem}.py, one layer"
        yield AttentionComparison(title, ours, build_attention(rotate, q, k, v, output))
    polar = module.PolarEmbedding(WIDTH // HEADS, HEADS, bias_uniform_init=False)
    polar.learned_bias.uniform_(-6.0, 0.0, generator=torch.Generator().manual_seed(6))

    def rotate_polar(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        frequencies, bias = polar(torch.arange(q.shape[2]))
        return module.apply_polar_pos_emb(q, frequencies), module.apply_polar_pos_emb(k, frequencies + bias)

    ours = build_gpt(pos_emb="pope")
    ours.position.delta.value.copy_(polar.learned_bias[:, 0])
    copy_attention(ours, q, k, v, output)
    attend = build_attention(rotate_polar, q, k, v, output)
    yield AttentionComparison(f"pope: x-transformers' {stem}.py, one layer", ours, attend)
