"""Reference implementation of stick-breaking attention from its authors' repository, with a layer's projections."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module

REPOSITORY = "shawntan/stickbreaking-attention"
NOTES = """\
Its tests add the unused weight to the output, with the row's own value. The reference returns it separately, as in the
paper, and the rows follow the reference.
A row attends to its own token only with `attend_current`; `stick-breaking` never does.
"""


def build_attention(
    attend: Callable[..., tuple[Tensor, Tensor]], projections: list[Tensor]
) -> Callable[[Tensor], Tensor]:
    """Build attention by a published function, with projections [D, D] of queries, keys, values and the output."""
    *inputs, output = projections

    def call(x: Tensor) -> Tensor:
        q, k, v = ((x @ weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for weight in inputs)
        ones = torch.ones(x.shape[1], x.shape[1])
        found, _ = attend(q, k, v, ones.triu().bool(), ones.tril(-1))
        return found.transpose(1, 2).flatten(2) @ output.T

    return call


def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of its reference in plain PyTorch."""
    stem = "sb_ref"
    module = load_module(clone / "stickbreaking_attention" / f"{stem}.py")
    generator = torch.Generator().manual_seed(3)
    projections = [0.15 * torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(4)]
    ours = build_gpt(pos_emb="none", softmax_type="stick-breaking")
    copy_attention(ours, *projections)
    title = f"stick-breaking: one layer's attention, {stem}.py of its authors"
    yield AttentionComparison(title, ours, build_attention(module.stickbreaking, projections))
