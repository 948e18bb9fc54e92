"""Fixed biases of Exploring Transformer Extrapolation, from its authors' version of fairseq."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module
from tools.methods.published.x_transformers import draw_projections

REPOSITORY = "OpenNLPLab/fairseq-evo"
NOTES = """\
Its biases are numbered; comments beside the numbers identify the series and thus their names in the paper.
The vectors of its Sandwich are twice as long as a head.
"""
MISSING = (
    "einops", "fairseq", "fairseq.distributed", "fairseq.models", "fairseq.models.transformer", "fairseq.modules",
    "fairseq.modules.checkpoint_activations", "fairseq.modules.helpers", "fairseq.modules.quant_noise", "omegaconf",
)  # fmt: skip
"""Modules that its file imports but its biases do not use."""
SERIES = {"alibi": 3, "type1": 4, "type2": 11, "inverse": 7, "inverse_nlogn": 13}


@torch.no_grad()
def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of one attention layer."""
    stem = "transformer_rpe"
    module = load_module(clone / "fairseq/models/xformer/x_attention" / f"{stem}.py", missing=MISSING)
    module.utils.fill_with_neg_inf = lambda tensor: tensor.fill_(float("-inf"))
    for name, number in SERIES.items():
        released = {} if name == "alibi" else {"pos_emb_options": {"released": True}}
        title = f"{name}{', released' if released else ''}: type {number} of fairseq-evo's {stem}.py, one layer"
        yield _compare(
            title, lambda length, number=number: _compute_series(module, length, number), pos_emb=name, **released
        )
    keys = {"pos_emb": "sandwich", "pos_emb_options": {"dimension": 2 * WIDTH // HEADS}}
    yield _compare(
        f"sandwich: fairseq-evo's {stem}.py, one layer", lambda length: _compute_sandwich(module, length), **keys
    )


def _compute_series(module: ModuleType, length: int, number: int) -> Tensor:
    """Return its bias [H, T, T], −∞ for later keys."""
    return torch.stack([module.get_mask_k(length, number, slope) for slope in module.get_slopes(HEADS)])


def _compute_sandwich(module: ModuleType, length: int) -> Tensor:
    """Return its Sandwich bias [H, T, T], −∞ for later keys."""
    sizes = {"tokens_per_sample": length, "decoder_attention_heads": HEADS, "decoder_embed_dim": WIDTH}
    decoder = module.TransformerRpeDecoder(SimpleNamespace(**sizes, sandwich=1), None, None)
    decoder.args, decoder._future_mask = SimpleNamespace(**sizes), torch.zeros(0, 0)
    mask: Tensor = decoder.buffered_future_mask_sandwich(torch.zeros(1, length))
    return mask


def _compare(title: str, build_mask: Callable[[int], Tensor], **keys: object) -> AttentionComparison:
    ours = build_gpt(**keys)
    projections = draw_projections()
    copy_attention(ours, *projections)
    q, k, v, output = projections

    def attend(x: Tensor) -> Tensor:
        heads = [(x @ weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for weight in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        weights = (scores + build_mask(x.shape[1])).softmax(-1)
        return (weights @ heads[2]).transpose(1, 2).flatten(2) @ output.T

    return AttentionComparison(title, ours, attend)
