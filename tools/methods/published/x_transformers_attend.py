"""x-transformers' attention: talking heads and selective attention."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.methods.comparison import HEADS, AttentionComparison, build_gpt, copy_attention, load_module
from tools.methods.published.x_transformers import draw_projections

REPOSITORY = "lucidrains/x-transformers"
NOTES = """\
x-transformers adds its first head mixing to the logits, like `talking_heads`. Its second replaces the weights, so the
row subtracts the identity.
Its selective attention is compared without a cache. With a cache its results differ, because it does not remember what
earlier rows masked; ours are the same.
"""


@torch.no_grad()
def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of one attention layer."""
    stem = "attend"
    module = load_module(clone / "x_transformers" / f"{stem}.py")
    q, k, v, output = projections = draw_projections()
    talking = module.Attend(causal=True, heads=HEADS, pre_talking_heads=True, post_talking_heads=True)
    ours = build_gpt(pos_emb="none", score_processor="talking_heads")
    processor = ours.decoder.layers[0].self_attention.core_attention.processor
    generator = torch.Generator().manual_seed(8)
    for theirs, own, rest in (
        (talking.pre_softmax_talking_heads, processor.logits, 0.0),
        (talking.post_softmax_talking_heads, processor.weights, torch.eye(HEADS)),
    ):
        theirs.weight.copy_(torch.randn(theirs.weight.shape, generator=generator) * 0.5)
        own.weight.copy_(theirs.weight[None, :, :, 0, 0] - rest)
    copy_attention(ours, *projections)
    yield AttentionComparison(
        f"talking_heads: x-transformers' {stem}.py, one layer", ours, build_attention(talking, *projections)
    )
    selective = module.Attend(causal=True, heads=HEADS, selective=True)
    ours = build_gpt(pos_emb="none", score_processor="selective")
    copy_attention(ours, *projections)
    yield AttentionComparison(
        f"selective: x-transformers' {stem}.py, one layer", ours, build_attention(selective, q, k, v, output)
    )


def build_attention(attend: nn.Module, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> Callable[[Tensor], Tensor]:
    """Build its attention with projections [D, D]."""

    def call(x: Tensor) -> Tensor:
        heads = [(x @ weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for weight in (q, k, v)]
        attended, _ = attend(*heads)
        return attended.transpose(1, 2).flatten(2) @ output.T

    return call
