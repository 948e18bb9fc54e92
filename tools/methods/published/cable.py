"""CABLE's repository: its attention, which equals FoX's without 1/√d."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module

REPOSITORY = "axiomlab/Cable"
NOTES = """\
CABLE's −softplus(y) equals log σ(−y) of `fox`, so its projection has the opposite sign.
It divides queries and keys by √(C/n_embd) = 1 instead of the paper's √d, like `query_pre_attn_scalar: 1`.
"""


def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of its attention layer, whose mask is built for one length."""
    stem = "Cable"
    module = load_module(clone / "src" / f"{stem}.py")
    theirs = module.CausalSelfAttention(SimpleNamespace(n_embd=WIDTH, n_head=HEADS, block_size=1)).eval()
    theirs.device = "cpu"
    ours = build_gpt({"query_pre_attn_scalar": 1.0}, pos_emb="fox", pos_emb_per_layer=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            if name in ("c_attn.bias", "c_proj.bias"):
                parameter.zero_()
        forget = ours.decoder.layers[0].self_attention.core_attention.position.forget
        forget.weight.copy_(-theirs.h_attn.weight)
        forget.bias.copy_(-theirs.h_attn.bias)
    copy_attention(ours, *theirs.c_attn.weight.chunk(3), theirs.c_proj.weight)

    def attend(x: Tensor) -> Tensor:
        theirs.block_size = x.shape[1]
        output: Tensor = theirs(x)
        return output

    yield AttentionComparison(f"fox, query_pre_attn_scalar 1: CABLE's src/{stem}.py, one layer", ours, attend)
