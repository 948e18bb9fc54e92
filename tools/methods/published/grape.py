"""GRAPE's repository: its additive biases with gates, and its attention with them."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention

REPOSITORY = "model-architectures/GRAPE"
NOTES = """\
GRAPE's code normalizes u and v to length 1, unlike its paper: the rows use `normalize: true`.
Its comment on the bias omits √d and ALiBi's slopes; its code has both, like `grape_a`.
"""


def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of its attention with the bias from the key, and with the bias from query and key."""
    package = sys.modules["published_grape"] = ModuleType("published_grape")
    package.__path__ = [str(clone / "model")]
    config = SimpleNamespace(
        n_head=HEADS, n_embd=WIDTH, head_dim=WIDTH // HEADS, n_layer=1, using_groupnorm=False, use_qk_rmsnorm=False
    )
    for gates, stem in (("key", "keygated"), ("query_key", "querykeygated")):
        module = importlib.import_module(f"published_grape.llama-mha-grape-a-{stem}")
        theirs = module.CausalSelfAttention(config).eval()
        ours = build_gpt(pos_emb="grape_a", pos_emb_options={"gates": gates, "normalize": True}, pos_emb_per_layer=True)
        generator = torch.Generator().manual_seed(3)
        own = ours.decoder.layers[0].self_attention.core_attention.position
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            bias = getattr(theirs, f"{stem}_bias")
            own.omega.value.copy_(bias.omega)
            own.u.value.copy_(bias.u)
            if own.v is not None:
                own.v.value.copy_(bias.v)
        copy_attention(ours, *(getattr(theirs, f"c_{name}").weight for name in ("q", "k", "v", "proj")))
        yield AttentionComparison(f"grape_a, gates {gates}: GRAPE's attention, one layer", ours, theirs)
